"""The calls of modules that are under way, and what is seen of each module."""

from __future__ import annotations

import time
from types import FrameType
from typing import Any

from torch import nn

from dtypepin._audit.nonfinite import Call, FirstBad, is_finite
from dtypepin._audit.ops import dtypes
from dtypepin._audit.report import ModuleRow
from dtypepin._audit.seen import Pins
from dtypepin._base.selection import named
from dtypepin._base.torch_private import in_backward
from dtypepin._pin import frames, hooks


class Calls:
    """The stack of calls, and a row for each module of the model.

    Attributes:
        rows: of every module, called or not.
        called: of those that were called, in order of their first call.
        running: the calls under way, the innermost last.
    """

    def __init__(self, model: nn.Module, pins: Pins, first_bad: FirstBad, timing: bool) -> None:
        self.rows = {f.module: ModuleRow(f.names[0], f.class_name) for f in named(model)}
        self.called: list[ModuleRow] = []
        self.running: list[Call] = []
        self._pins, self._first_bad, self._timing = pins, first_bad, timing

    def of(self, module: nn.Module) -> Call | None:
        """The innermost call, if it is one of this module."""
        call = self.running[-1] if self.running else None
        return call if call is not None and call.module is module else None

    def drop_stale(self) -> None:
        """Forget calls that an exception ended: torch calls no hook after it."""
        while self.running and not frames.is_running(self.running[-1].owner):
            self.running.pop()

    def enter(self, module: nn.Module, args: Any, owner: FrameType) -> None:
        """A module is called."""
        self.drop_stale()
        row = self.rows.get(module)
        call = Call(module, row, owner)
        self.running.append(call)
        if row is None:
            return
        if not row.calls and not row.recomputed:
            self.called.append(row)
        if in_backward():
            row.recomputed += 1
        else:
            row.calls += 1
        self.inputs(call, args)
        call.start = time.perf_counter()

    def inputs(self, call: Call, values: Any) -> None:
        """The inputs of a call, before a pin casts them."""
        row = call.row
        if row is None:
            return
        row.dtype_in += [dtype for dtype in dtypes(values) if dtype not in row.dtype_in]
        if not call.bad_in and not is_finite(values):
            call.bad_in = True
            row.nonfinite_in += 1

    def leave(self, module: nn.Module, kwargs: Any, output: Any) -> None:
        """A call ends; where its module is pinned, the pin has not cast the output back yet."""
        self.drop_stale()
        call = self.of(module)
        if call is None:
            return
        row = call.row
        if row is None:
            self.running.pop()
            return
        if self._timing:
            row.seconds = (row.seconds or 0.0) + time.perf_counter() - call.start
        if any(pin.method == "forward" for pin in hooks.on(module)):
            call.result = ", ".join(dtypes(output)) if is_finite(output) else ""
            return
        self.inputs(call, kwargs)
        self.output(call, output)

    def output(self, call: Call, output: Any) -> None:
        """The output of a call, after a pin has cast it back."""
        self.running.pop()
        row = call.row
        assert row is not None
        row.dtype_out += [dtype for dtype in dtypes(output) if dtype not in row.dtype_out]
        if is_finite(output):
            return
        row.nonfinite_out += 1
        row.overflowed += bool(call.result)
        seen = self._pins.get(hooks.top(call.module, "forward"))
        if seen is not None:
            seen.bad += call.bad_in and not call.result
        self._first_bad.output(call, row, self.running)
