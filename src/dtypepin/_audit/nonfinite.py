"""Where the first inf or nan comes from."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from dtypepin._audit.report import ModuleRow
from dtypepin._audit.seen import Seen, quoted
from dtypepin._base.dtypes import short
from dtypepin._base.nested import map_tensors
from dtypepin._base.torch_private import in_functorch


class _Quiet(threading.local):
    on = False


#: While on, no audit of this thread records: one looks at values, or is nested in another.
quiet = _Quiet()


@contextmanager
def silence() -> Iterator[None]:
    """Let no audit record what is done in this block."""
    before, quiet.on = quiet.on, True
    try:
        yield
    finally:
        quiet.on = before


class Call:
    """A module's call in progress; ``owner`` tells whether it still is."""

    __slots__ = ("bad_in", "module", "owner", "result", "row", "start")

    def __init__(self, module: nn.Module, row: ModuleRow | None, owner: FrameType) -> None:
        self.module, self.row, self.owner = module, row, owner
        self.bad_in = False
        self.result = ""  # dtype of the output before a pin cast it back, if it was finite
        self.start = 0.0


class FirstBad:
    """The first value that was not finite, and the module that it came out of.

    Attributes:
        text: what to say of it; empty as long as there was none.
        culprit: the module where it came out, or that made it, seen later.
    """

    def __init__(self) -> None:
        self.text = ""
        self.culprit: ModuleRow | None = None
        self._around: list[Call] = []  # what was running there, where one had gone in

    def output(self, call: Call, row: ModuleRow, running: list[Call]) -> None:
        """A call gave a value that is not finite, while others were running round it."""
        if self.culprit is None or (not call.bad_in and any(call is c for c in self._around)):
            text = f"the output of {quoted(row.name)}, its input "
            text += "already not finite" if call.bad_in else "finite"
            if call.result:
                text += f", and {call.result} before the pin cast it back"
            if self.culprit is not None:
                text = f"made by {quoted(row.name)} itself, first seen as an input of "
                text += quoted(self.culprit.name)
            self.text = f"first bad value: {text}"
            self.culprit, self._around = row, running[:] if call.bad_in else []

    def cast(self, by: Seen, before: Tensor, after: Tensor, back: bool) -> None:
        """A pin casts an output back, or what goes in: it may make a number infinite."""
        with silence():
            if by.overflow or is_finite(after) or not is_finite(before):
                return
        what = f"its output is too large for {short(after.dtype)}, which it is cast back to"
        by.overflow = what if back else f"what goes in is too large for {short(after.dtype)}"
        if back and by.rule.method != "forward" and not self.text:  # no hook sees it
            name = f"{by.row.name}.{by.rule.method}".lstrip(".")
            self.text = f"first bad value: the output of {name!r}, finite before the pin cast "
            self.text += f"it back to {short(after.dtype)}"


def is_finite(values: Any) -> bool:
    """Whether all floating tensors in a nested value are finite."""
    if in_functorch():
        return True  # there is no bool of a batch
    finite = True

    def look(tensor: Tensor) -> Tensor:
        nonlocal finite
        if finite and tensor.layout is torch.strided and not tensor.is_meta:
            with suppress(RuntimeError):  # a nested or a fake tensor: unknown
                values = tensor.detach()
                finite = bool(values.isfinite().all())
                # What a mask adds is no fault.
                finite = finite or bool(((values == -math.inf) | (values == 0)).all())
        return tensor

    with silence():
        map_tensors(values, look)
    return finite
