"""Sees every op and every call of a module, and notes them where they belong."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from dtypepin._audit import verdicts, without_pins
from dtypepin._audit.calls import Calls
from dtypepin._audit.causes import Causes
from dtypepin._audit.nonfinite import FirstBad, quiet
from dtypepin._audit.ops import computes_in, name_of
from dtypepin._audit.report import AuditReport, by_severity
from dtypepin._audit.seen import Pins, quoted
from dtypepin._audit.without_pins import Hook, WithoutPins
from dtypepin._base.errors import PinError
from dtypepin._base.selection import named
from dtypepin._base.torch_private import (
    TorchDispatchMode,
    in_backward,
    register_global_forward_hook,
)
from dtypepin._pin import arguments, frames, hooks, reads, region, storage
from dtypepin._pin.frames import Rule
from dtypepin._pin.hooks import Pin

_ENTER, _LEAVE = region.enter.__code__, region.leave.__code__
_READ = reads.ParameterView.__getitem__.__code__


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every op below autograd and autocast, and knows the innermost module and region."""

    def __init__(self, model: nn.Module, timing: bool, measures: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self.timing = model, timing
        self.report = AuditReport()
        self.pins = Pins()
        self.causes = Causes()
        self.first_bad = FirstBad()
        self.calls = Calls(model, self.pins, self.first_bad, timing)
        self.report.modules = self.calls.called
        self.hooked = ExitStack()
        self.last_frame: frames.Frame | None = None
        self.thread = threading.get_ident()
        self.compiled = any("_orig_mod" in part._modules for part in model.modules())
        self.compiled |= any(part._compiled_call_impl is not None for part in self.calls.rows)
        if self.compiled and not hasattr(torch.compiler, "set_stance"):
            raise PinError(
                f"model: got a compiled one, which torch {torch.__version__} cannot run eagerly; "
                "audit the model that was compiled, uncompiled, or with torch 2.6 or newer"
            )
        many = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.alone = not many or torch.distributed.get_world_size() == 1
        self.measures = measures and self.alone
        self.without_pins = WithoutPins(self.pins.of_rule)

    # What is hooked: all modules by global hooks, since own ones would switch fast paths off.

    def hook(self) -> None:
        before = register_module_forward_pre_hook(self.enter_module)
        self.hooked.callback(before.remove)
        self.hooked.callback(register_global_forward_hook(self.leave_module))
        for module in self.calls.rows:
            for pin in hooks.on(module):
                if pin.active:
                    self.watch(module, pin, True)
                self.pins.begin(pin)
        hooks.watchers.append(self.watch)
        self.hooked.callback(hooks.watchers.remove, self.watch)

    def watch(self, module: nn.Module, pin: Pin, came: bool) -> None:
        """A pin was put on a module, or is about to go."""
        if not came:
            self.pins.goes(pin)
            return
        row = self.calls.rows.get(module)
        if row is None:
            return
        hooked = any(seen.rule.method == "forward" for seen in self.pins.on(module))
        seen = self.pins.came(module, row, pin)
        if seen is not None:
            self.causes.expect(seen)
        if pin.method == "forward" and not hooked:
            before = module.register_forward_pre_hook(
                Hook(self.before_pin), with_kwargs=True, prepend=True
            )
            self.hooked.callback(before.remove)
            after = module.register_forward_hook(Hook(self.after_pin), with_kwargs=True)
            self.hooked.callback(after.remove)

    # Modules.

    def enter_module(self, module: nn.Module, args: Any) -> None:
        if self.without_pins.running and not quiet.on:
            self.without_pins.enter(module)
        if not self.elsewhere():
            self.calls.enter(module, args, sys._getframe(1))
            self.compiled |= "_orig_mod" in module._modules

    def before_pin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The arguments of a pinned module, keywords too, before its pin casts them."""
        call = None if self.elsewhere() else self.calls.of(module)
        if call is None:
            return
        self.calls.inputs(call, kwargs)
        pin = hooks.top(module, "forward")
        seen = self.pins.get(pin)
        if pin is None or seen is None:
            return
        if any(pin.number in block for block in frames.thread.disabled):
            seen.cause = "switched off by disabled()"
            return
        seen.calls += 1
        if seen.calls == 1:
            seen.stored = storage.stored_bytes(module)
        if not self.measures or in_backward() or frames.current() is not None:
            return  # inside another pin's region, that one measures
        if self.without_pins.is_new(seen, args, kwargs):
            self.without_pins.run(module, args, kwargs)

    def leave_module(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.without_pins.running:
            self.without_pins.leave()
        if not self.elsewhere():
            self.calls.leave(module, kwargs, output)
            self.forget_frame()

    def after_pin(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """The output of a pinned module after its pin has cast it back, and its cast inputs."""
        call = None if self.elsewhere() else self.calls.of(module)
        if call is None:
            return
        self.calls.output(call, output)
        self.forget_frame()
        pin = hooks.top(module, "forward")
        seen = self.pins.get(pin)
        if pin is not None and seen is not None and not seen.not_cast:
            seen.not_cast = arguments.not_cast(pin, args, kwargs)

    def forget_frame(self) -> None:
        if not self.calls.running and frames.current() is None:
            self.last_frame = None  # it keeps what its call was given

    def elsewhere(self) -> bool:
        """Whether this call is none of ours: in another thread, or an extra run."""
        return quiet.on or self.without_pins.running or threading.get_ident() != self.thread

    # Ops.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not quiet.on:
            self.record(func, args, kwargs or {}, out)
        return out

    def record(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self.calls.drop_stale()
        calls = self.calls.running
        if in_backward() and not calls:
            return  # an op of the backward itself
        dtype = computes_in(op, (args, kwargs), out)
        if self.without_pins.running:
            self.without_pins.op(dtype)
            return
        if calls:
            self.causes.look(args, calls)
        name = name_of(op)
        if name == "_to_copy":
            rule, back = _who_casts()
            by = self.pins.get(rule)
            if by is not None:
                by.bytes += args[0].numel() * (kwargs.get("dtype") or args[0].dtype).itemsize
                self.first_bad.cast(by, args[0], out, back)
        row = calls[-1].row if calls else None
        frame = frames.current()
        seen = self.pins.get(frame.rule) if frame is not None and frame.dtype is not None else None
        if seen is not None and frame is not None and frame is not self.last_frame:
            self.last_frame = frame
            seen.calls += frame.rule.method != "forward"
        if dtype is None:
            if row is not None:
                row.moved += 1
            return
        if row is not None:
            row.compute[dtype] = row.compute.get(dtype, 0) + 1
        if seen is not None:
            seen.ops[name, dtype] = None

    # The end.

    def finish(self) -> None:
        self.pins.end()
        self.report.first_bad = self.first_bad.text
        culprit = self.first_bad.culprit
        rows = [verdicts.row(seen, self.model, culprit) for seen in self.pins.every()]
        self.report.pins = sorted(rows, key=by_severity)
        self.report.notes += self.notes()

    def notes(self) -> Iterator[str]:
        """How this was measured."""
        if self.compiled:
            yield "compiled code ran eagerly for this audit"
        new = [found.names[0] for found in named(self.model) if found.module not in self.calls.rows]
        if new:
            names = ", ".join(map(quoted, new[:5])) + (" ..." if len(new) > 5 else "")
            yield f"added to the model inside the block, so not looked at: {names}"
        if self.timing:
            yield "times are disturbed by the measuring; compare them, no more"
        if not self.alone:
            yield "several processes take part: 'no effect' was not measured"
        if self.measures:
            names = ", ".join(map(quoted, without_pins.not_measured(self.pins.every())))
            if names:
                yield f"'no effect' could not be measured: {names}"


def _who_casts() -> tuple[Rule | None, bool]:
    """The pin that makes the cast which is being recorded, if one does; whether of an output."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(16):
        if frame is None:
            return None, False
        code = frame.f_code
        if code is _ENTER:
            rule: Rule = frame.f_locals["rule"]
            return rule, False
        if code is _LEAVE:
            left: frames.Frame = frame.f_locals["frame"]
            return left.rule, True
        if code is _READ:
            current = frames.current()
            return None if current is None else current.rule, False
        frame = frame.f_back
    return None, False
