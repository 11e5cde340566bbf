"""Recording what really runs, in which dtype, and judging every pin by it."""

from __future__ import annotations

import copy
import math
import random
import sys
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from dtypepin._audit.report import (
    BAD_INPUT,
    HONOURED,
    NEVER_RAN,
    NO_EFFECT,
    PARTLY,
    AuditReport,
    ModuleRow,
    PinRow,
    by_severity,
)
from dtypepin._base.dtypes import short
from dtypepin._base.errors import PinError
from dtypepin._base.model_state import random_numbers_kept, run_eagerly
from dtypepin._base.nested import map_tensors
from dtypepin._base.selection import class_name, named
from dtypepin._base.torch_private import in_backward, in_functorch, register_global_forward_hook
from dtypepin._pin import arguments, frames, hooks, reads, region, storage
from dtypepin._pin.frames import Rule
from dtypepin._pin.hooks import Pin

#: Ops that move, make or compare data and compute nothing in it; views are told by their schema.
_MOVES = frozenset(
    """
    _to_copy copy_ copy clone contiguous cat stack index_select gather embedding scatter scatter_
    index index_put index_put_ _index_put_impl_ masked_fill masked_fill_ where select_scatter
    slice_scatter constant_pad_nd empty_like zeros_like ones_like full_like rand_like randn_like
    new_empty new_zeros new_ones new_full new_empty_strided fill_ zero_ bernoulli_ uniform_ normal_
    random_ flip roll repeat _unsafe_view _reshape_copy equal
    item _local_scalar_dense is_nonzero lift_fresh lift_fresh_copy set_ resize_ tril triu tril_
    triu_ sort topk detach masked_select masked_scatter masked_scatter_ diag_embed index_fill
    index_fill_ take put put_ im2col pixel_shuffle pixel_unshuffle channel_shuffle _unique _unique2
    unique_dim unique_consecutive diagonal_scatter as_strided_scatter expand_copy
    """.split()  # noqa: SIM905 (one word a line otherwise)
)

_ENTER, _LEAVE = region.enter.__code__, region.leave.__code__
_READ = reads.ParameterView.__getitem__.__code__


class _Quiet(threading.local):
    on = False


#: While on, no recorder of this thread records: an audit looks at values, or is nested in another.
_quiet = _Quiet()


#: How often a pinned module is run without pins, under other circumstances each time.
_MOST_MEASURED = 8


class _Hook:
    """A hook of an audit; in a copy or a pickle of the model it does nothing."""

    def __init__(self, function: Callable[..., object]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> None:
        self.function(*args)

    def __deepcopy__(self, memo: object) -> _Hook:
        return _Hook(_nothing)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_nothing,)


def _nothing(*args: object) -> None:
    pass


class _Seen:
    """What was seen of one pin.

    The same pin put on again, as ``pin_dtype`` round every step does, is the same here.

    Attributes:
        module: the pinned module.
        rule: its settings.
        ran: whether it ran in the audit.
        calls: calls of its method.
        ops: which ops ran in its regions in which dtype.
        without: dtypes of ops in it and its children without pins; None where not measured.
        measured: under which autocast and with which inputs.
        bytes: size of all casts that it made.
        stored: what storing parameters took, at the first call; the pin may be off in the end.
        not_cast: what to say of inputs that its regions got in another dtype.
        bad: calls with a non-finite value in the inputs and in the outputs.
        overflow: what to say where one of its casts made a number infinite.
        cause: why it has not run, as far as can be told.
    """

    def __init__(self, module: nn.Module, pin: Pin) -> None:
        self.module, self.rule = module, pin
        self.ran = False
        self.calls = 0
        self.ops: dict[tuple[str, str], None] = {}
        self.without: set[str] | None = None
        self.measured: set[object] = set()
        self.bytes = 0
        self.stored = 0
        self.not_cast = ""
        self.bad = 0
        self.overflow = ""
        self.cause = ""
        # What is looked for on the stack while the pin has not run.
        self.codes: set[CodeType] = {
            value.__code__
            for kind in type(module).__mro__
            if kind is not nn.Module and issubclass(kind, nn.Module)
            for value in vars(kind).values()
            if isinstance(value, FunctionType) and value.__code__.co_argcount
        }


class _Call:
    """A module's call in progress; ``owner`` tells whether it still is."""

    __slots__ = ("bad_in", "module", "owner", "result", "row", "start")

    def __init__(self, module: nn.Module, row: ModuleRow | None, owner: FrameType) -> None:
        self.module, self.row, self.owner = module, row, owner
        self.bad_in = False
        self.result = ""  # dtype of the output before a pin cast it back, if it was finite
        self.start = 0.0


class audit:
    """Record, for a block, in which dtypes the modules of a model compute.

    Ops are seen as they run, below autocast: this is what happened, not what was asked for. Ops of
    the backward are out of scope; what a checkpoint computes again in it is counted apart. Only
    the thread that enters the block is recorded. Compiled code runs eagerly in it.

    To tell a pin that changes nothing, a copy of each pinned module runs without pins on the same
    inputs: at its first call, and again under another autocast or with inputs of other dtypes. The
    model and the random numbers do not notice, except of a ``torch.Generator`` that belongs to
    nobody; forward hooks of yours run in it too. It takes the memory of the module meanwhile.

    Example:
        >>> import torch, dtypepin
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1)).bfloat16()
        >>> with dtypepin.pin_dtype(model, "1"), dtypepin.audit(model) as report:
        ...     out = model(torch.zeros(2, 4, dtype=torch.bfloat16))
        >>> report.pins[0].verdict
        'honoured'
        >>> report.modules[-1].compute
        {'float32': 1}

    Args:
        model: the model; wrappers are seen through. Modules added inside the block are not seen.
        timing: also measure the time in each module, disturbed by the measuring.
        without_pins: False leaves out the extra runs; ``no effect`` is not told then.

    Returns:
        On entering, an :class:`AuditReport` that is complete after the block.

    Raises:
        PinError: ``model`` is no module, or it is compiled and torch is older than 2.6.

    Limits:
        The extra runs are left out where more than one process takes part, where a module cannot
        be copied or does not run by itself, and for pinned methods other than forward; a note in
        the report says so.
    """

    def __init__(
        self, model: nn.Module, *, timing: bool = False, without_pins: bool = True
    ) -> None:
        if not isinstance(model, nn.Module):
            raise PinError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
        self._arguments = (model, timing, without_pins)
        self._entered: list[tuple[ExitStack, _Recorder]] = []

    def __enter__(self) -> AuditReport:
        recorder = _Recorder(*self._arguments)
        with ExitStack() as stack:
            stack.callback(recorder.finish)
            if stack.enter_context(run_eagerly()):
                stack.enter_context(warnings.catch_warnings())
                # They fire once more, for torch.compile's wrapper, which is no module of the model.
                warnings.filterwarnings("ignore", "(?s).*when there are global hooks on modules")
            stack.enter_context(recorder.hooked)
            recorder.hook()
            stack.enter_context(recorder)
            self._entered.append((stack.pop_all(), recorder))
        return recorder.report

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        stack, _ = self._entered.pop()
        stack.__exit__(kind, error, trace)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every op below autograd and autocast, and knows the innermost module and region."""

    def __init__(self, model: nn.Module, timing: bool, without_pins: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self.timing = model, timing
        self.report = AuditReport()
        self.rows = {f.module: ModuleRow(f.names[0], f.class_name) for f in named(model)}
        self.seen: dict[nn.Module, list[_Seen]] = {}
        self.pins: WeakKeyDictionary[Rule, _Seen] = WeakKeyDictionary()
        self.ran_before: list[Pin] = []
        self.weights: dict[int, list[_Seen]] = {}  # pins by the ``id`` of what a module owns
        self.weightless: dict[int, list[_Seen]] = {}  # those of modules that own nothing
        self.codes: set[CodeType] = set()
        self.calls: list[_Call] = []
        self.hooked = ExitStack()
        self.last_frame: frames.Frame | None = None
        self.twins: dict[nn.Module, _Seen] | None = None  # while a copy runs without pins
        self.twin_calls: list[nn.Module] = []
        self.first_bad = ""
        self.culprit: nn.Module | None = None  # where the first bad value came out
        self.around: list[_Call] = []  # what was running there, where one had gone in
        self.thread = threading.get_ident()
        self.compiled = any("_orig_mod" in part._modules for part in model.modules())
        self.compiled |= any(part._compiled_call_impl is not None for part in self.rows)
        if self.compiled and not hasattr(torch.compiler, "set_stance"):
            raise PinError(
                f"model: got a compiled one, which torch {torch.__version__} cannot run eagerly; "
                "audit the model that was compiled, uncompiled, or with torch 2.6 or newer"
            )
        many = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.alone = not many or torch.distributed.get_world_size() == 1
        self.without_pins = without_pins and self.alone

    # What is hooked: all modules by global hooks, since own ones would switch fast paths off.

    def hook(self) -> None:
        before = register_module_forward_pre_hook(self.enter_module)
        self.hooked.callback(before.remove)
        self.hooked.callback(register_global_forward_hook(self.leave_module))
        for module in self.rows:
            for pin in hooks.on(module):
                if pin.active:
                    self.watch(module, pin, True)
                if pin.ran:
                    self.ran_before.append(pin)
                    pin.ran = False
        hooks.watchers.append(self.watch)
        self.hooked.callback(hooks.watchers.remove, self.watch)

    def watch(self, module: nn.Module, pin: Pin, came: bool) -> None:
        """A pin was put on a module, or is about to go."""
        if not came:
            if pin in self.pins:
                self.pins[pin].ran |= pin.ran
            return
        if module not in self.rows:
            return
        here = self.seen.setdefault(module, [])
        hooked = any(seen.rule.method == "forward" for seen in here)
        for seen in here:
            if seen.rule.method == pin.method and pin.does_the_same_as(seen.rule):
                self.pins[pin] = seen
                break
        else:
            self.pins[pin] = seen = _Seen(module, pin)
            here.append(seen)
            self.codes |= seen.codes
            floats = [value for _, value in reads.own_floats(module)]
            for value in floats:
                self.weights.setdefault(id(value), []).append(seen)
            if not floats:
                self.weightless.setdefault(id(module), []).append(seen)
        if pin.method == "forward" and not hooked:
            before = module.register_forward_pre_hook(
                _Hook(self.before_pin), with_kwargs=True, prepend=True
            )
            self.hooked.callback(before.remove)
            after = module.register_forward_hook(_Hook(self.after_pin), with_kwargs=True)
            self.hooked.callback(after.remove)

    def known(self, pin: Rule | None) -> _Seen | None:
        return None if pin is None else self.pins.get(pin)

    # Modules.

    def enter_module(self, module: nn.Module, args: Any) -> None:
        if self.twins is not None and not _quiet.on:
            self.twin_calls.append(module)
            if module in self.twins and self.twins[module].without is None:
                self.twins[module].without = set()
        if self.elsewhere():
            return
        self.drop_stale()
        row = self.rows.get(module)
        call = _Call(module, row, sys._getframe(1))
        self.calls.append(call)
        self.compiled |= "_orig_mod" in module._modules
        if row is None:
            return
        if not row.calls and not row.recomputed:
            self.report.modules.append(row)
        if in_backward():
            row.recomputed += 1
        else:
            row.calls += 1
        self.look_at_inputs(call, args)
        call.start = time.perf_counter()

    def before_pin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The arguments of a pinned module, keywords too, before its pin casts them."""
        if self.elsewhere() or not self.calls or self.calls[-1].module is not module:
            return
        self.look_at_inputs(self.calls[-1], kwargs)
        pin = hooks.top(module, "forward")
        if pin is None or pin not in self.pins:
            return
        seen = self.pins[pin]
        if any(pin.number in block for block in frames.thread.disabled):
            seen.cause = "switched off by disabled()"
            return
        seen.calls += 1
        if seen.calls == 1:
            seen.stored = storage.stored_bytes(module)
        if not self.without_pins or in_backward() or frames.current() is not None:
            return  # inside another pin's region, that one measures
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds]
        circumstances = repr((autocast, _dtypes((args, kwargs))))
        if circumstances not in seen.measured and len(seen.measured) < _MOST_MEASURED:
            seen.measured.add(circumstances)
            self.run_without(module, args, kwargs)

    def leave_module(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.twins is not None and self.twin_calls:
            self.twin_calls.pop()
        if self.elsewhere():
            return
        self.drop_stale()
        if not self.calls or self.calls[-1].module is not module:
            return
        call = self.calls[-1]
        row = call.row
        if row is None:
            self.calls.pop()
            return
        if self.timing:
            row.seconds = (row.seconds or 0.0) + time.perf_counter() - call.start
        if any(pin.method == "forward" for pin in hooks.on(module)):
            # Global hooks come first: the pin has not cast the output back yet.
            call.result = ", ".join(_dtypes(output)) if _finite(output) else ""
            return
        self.look_at_inputs(call, kwargs)
        self.look_at_output(call, output)

    def after_pin(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """The output of a pinned module after its pin has cast it back, and its cast inputs."""
        if not self.elsewhere() and self.calls and self.calls[-1].module is module:
            self.look_at_output(self.calls[-1], output)
            pin = hooks.top(module, "forward")
            seen = self.known(pin)
            if pin is not None and seen is not None and not seen.not_cast:
                seen.not_cast = arguments.not_cast(pin, args, kwargs)

    def look_at_inputs(self, call: _Call, values: Any) -> None:
        row = call.row
        assert row is not None
        row.dtype_in += [dtype for dtype in _dtypes(values) if dtype not in row.dtype_in]
        if not call.bad_in and not _finite(values):
            call.bad_in = True
            row.nonfinite_in += 1

    def look_at_output(self, call: _Call, output: Any) -> None:
        row = call.row
        assert row is not None
        self.calls.pop()
        if not self.calls and frames.current() is None:
            self.last_frame = None  # it keeps what its call was given
        row.dtype_out += [dtype for dtype in _dtypes(output) if dtype not in row.dtype_out]
        if _finite(output):
            return
        row.nonfinite_out += 1
        row.overflowed += bool(call.result)
        seen = self.known(hooks.top(call.module, "forward"))
        if seen is not None:
            seen.bad += call.bad_in and not call.result
        if self.culprit is None or (not call.bad_in and any(call is c for c in self.around)):
            text = f"the output of {_quoted(row.name)}, its input "
            text += "already not finite" if call.bad_in else "finite"
            if call.result:
                text += f", and {call.result} before the pin cast it back"
            if self.culprit is not None:
                text = f"made by {_quoted(row.name)} itself, first seen as an input of "
                text += _quoted(self.rows[self.culprit].name)
            self.first_bad = f"first bad value: {text}"
            self.culprit, self.around = call.module, self.calls[:] if call.bad_in else []

    def elsewhere(self) -> bool:
        """Whether this call is none of ours: in another thread, or an extra run."""
        return _quiet.on or self.twins is not None or threading.get_ident() != self.thread

    def drop_stale(self) -> None:
        """Forget calls that an exception ended: torch calls no hook after it."""
        while self.calls and not frames.is_running(self.calls[-1].owner):
            self.calls.pop()

    def run_without(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Find the dtypes that a forward computes in without any pins: measured, not guessed."""
        try:
            with _silence(), torch.no_grad():
                twins, twin, args, kwargs = _copy(module, args, kwargs, self)
        except Exception:
            return
        inside = [(pin, twins.get(id(seen.module))) for pin, seen in self.pins.items()]
        self.twins = {part: self.pins[pin] for pin, part in inside if part is not None}
        try:
            with (
                random_numbers_kept(module),
                _other_random_numbers_kept(),
                # Those of a checkpoint outside would keep what is saved here.
                torch.autograd.graph.saved_tensors_hooks(_same, _same),
                frames.disabled(list(self.pins)),
            ):
                twin(*args, **kwargs)
        except Exception as error:
            # Without pins dtypes may not fit: then they have an effect. Else it cannot be told.
            effect = any(word in str(error) for word in ("dtype", "scalar type", "same type"))
            for seen in self.twins.values():
                if seen.without is not None:
                    seen.without = {type(error).__name__} if effect else None
        finally:
            self.twins = None
            self.twin_calls.clear()

    # Ops.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not _quiet.on:
            self.record(func, args, kwargs or {}, out)
        return out

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self.drop_stale()
        if in_backward() and not self.calls:
            return  # an op of the backward itself
        name = func._schema.name.partition("::")[2]
        if self.twins is not None:
            dtype = _compute_dtype(func, name, (args, kwargs), out)
            for twin in self.twin_calls:
                if dtype is not None and twin in self.twins:
                    self.twins[twin].without |= {dtype}  # type: ignore[operator]
            return
        if self.calls:
            self.look_for_causes(args)
        if name == "_to_copy":
            rule, back = _who_casts()
            by = self.known(rule)
            if by is not None:
                by.bytes += args[0].numel() * (kwargs.get("dtype") or args[0].dtype).itemsize
                self.look_at_cast(by, args[0], out, back)
        dtype = _compute_dtype(func, name, (args, kwargs), out)
        row = self.calls[-1].row if self.calls else None
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

    def look_at_cast(self, by: _Seen, before: Tensor, after: Tensor, back: bool) -> None:
        """A cast of a pin that makes a number infinite; of an output, or of what goes in."""
        with _silence():
            if by.overflow or _finite(after) or not _finite(before):
                return
        what = f"its output is too large for {short(after.dtype)}, which it is cast back to"
        by.overflow = what if back else f"what goes in is too large for {short(after.dtype)}"
        if back and by.rule.method != "forward" and not self.first_bad:  # no hook sees it
            name = f"{self.rows[by.module].name}.{by.rule.method}".lstrip(".")
            self.first_bad = f"first bad value: the output of {name!r}, finite before the pin cast "
            self.first_bad += f"it back to {short(after.dtype)}"

    def look_for_causes(self, args: tuple[Any, ...]) -> None:
        """Why a pin has not run although the weight or the code of its module is in use."""
        for value in args:
            for seen in self.weights.get(id(value), ()):
                own = self.calls[-1].module
                if own is seen.module or all(value is not v for _, v in reads.own_floats(own)):
                    self.explain(seen, _running_method(seen))  # else it is tied
        if self.weightless:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None:
                code = frame.f_code
                if code in self.codes:
                    module = frame.f_locals.get(code.co_varnames[0])
                    for seen in self.weightless.get(id(module), ()):
                        self.explain(seen, code.co_name)
                frame = frame.f_back

    def explain(self, seen: _Seen, running: str | None) -> None:
        """Note why a pin has not run, while a method of its module is running, or none is."""
        pin = seen.rule
        under_way = pin.method == "forward" and any(c.module is seen.module for c in self.calls)
        if pin.ran or seen.ran or seen.cause or under_way or not self.calls:
            return
        caller = self.calls[-1].row
        who = _quoted(caller.name) if caller is not None else "a module outside the model"
        if running == pin.method == "forward":
            seen.cause = f"called through .forward() by {who}: call the module itself"
        elif running is None:
            seen.cause = f"{who} reads its weight and does not call it: pin that one"
        elif running != pin.method:
            seen.cause = f"its {running!r} ran: pin it with methods_to_override"

    # The verdicts.

    def finish(self) -> None:
        report = self.report
        report.first_bad = self.first_bad
        for rule, seen in self.pins.items():
            seen.ran |= rule.ran
        every = [seen for here in self.seen.values() for seen in here]
        report.pins = sorted(map(self.verdict, every), key=by_severity)
        for pin in self.ran_before:
            pin.ran = True
        not_measured: dict[str, None] = {}
        for seen in every if self.without_pins else ():
            here = seen.calls or seen.ops or seen.rule.method != "forward"
            if seen.ran and here and seen.without is None:
                not_measured[self.rows[seen.module].name] = None
        if self.compiled:
            report.notes.append("compiled code ran eagerly for this audit")
        new = [found.names[0] for found in named(self.model) if found.module not in self.rows]
        if new:
            names = ", ".join(map(_quoted, new[:5])) + (" ..." if len(new) > 5 else "")
            report.notes.append(f"added to the model inside the block, so not looked at: {names}")
        if self.timing:
            report.notes.append("times are disturbed by the measuring; compare them, no more")
        if not self.alone:
            report.notes.append("several processes take part: 'no effect' was not measured")
        if not_measured:
            names = ", ".join(map(_quoted, not_measured))
            report.notes.append(f"'no effect' could not be measured: {names}")

    def verdict(self, seen: _Seen) -> PinRow:
        module, pin, want = seen.module, seen.rule, short(seen.rule.dtype)
        row = self.rows.get(module)
        wrong = [f"{op} ran in {dtype}" for op, dtype in seen.ops if dtype != want]
        if not seen.ran:
            verdict, detail = NEVER_RAN, seen.cause
            if not detail:
                here = any(module is part for part in self.model.modules())
                detail = "its module was not called" if here else "its module has left the model"
        elif pin.method == "forward" and not seen.calls and not seen.ops:
            verdict, detail = NEVER_RAN, "only in another thread, which is not recorded"
        elif wrong:
            verdict, detail = PARTLY, ", ".join(wrong) + seen.not_cast
        elif seen.bad:
            verdict, detail = BAD_INPUT, "it comes from outside the model"
            if self.culprit is not None and self.culprit is not module:
                detail = f"first produced by {_quoted(self.rows[self.culprit].name)}"
        elif seen.overflow or (row is not None and row.overflowed):
            detail = seen.overflow or "its output is too large for the dtype it is cast back to"
            verdict = HONOURED
        elif seen.without and seen.without <= {want}:
            verdict, detail = NO_EFFECT, f"it computes in {want} without pins too"
        elif seen.without is not None and not seen.without and _loses_nothing(seen, row):
            verdict, detail = NO_EFFECT, "it computes nothing in floating point"
        else:
            verdict, detail = HONOURED, ""
            if seen.without is not None and not seen.ops:
                detail = "it computes nothing in floating point, but casts"
        calls = max(seen.calls, int(seen.ran))
        return PinRow(
            name=row.name if row else pin.name,
            class_name=row.class_name if row else class_name(module),
            method=pin.method,
            dtype=want,
            calls=calls,
            verdict=verdict,
            detail=detail,
            stored_bytes=seen.stored or storage.stored_bytes(module),
            cast_bytes=seen.bytes // max(calls, 1),
        )


@contextmanager
def _silence() -> Iterator[None]:
    before, _quiet.on = _quiet.on, True
    try:
        yield
    finally:
        _quiet.on = before


def _copy(
    module: nn.Module, args: Any, kwargs: Any, recorder: object
) -> tuple[dict[int, Any], nn.Module, Any, Any]:
    """A copy of a module, with the same hooks but those of audits, and one of its arguments.

    Before them, the copy of every part by the part's ``id``.
    """
    memo: dict[int, Any] = {id(recorder): recorder}
    for part in module.modules():
        for pin in hooks.on(part):
            memo[id(pin)] = pin
        for kind in (part._forward_pre_hooks, part._forward_hooks):
            memo[id(kind)] = OrderedDict(
                (key, hook) for key, hook in kind.items() if not isinstance(hook, _Hook)
            )

    def clone(tensor: Tensor) -> Tensor:
        memo[id(tensor)] = new = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return new

    map_tensors((args, kwargs), clone)
    new: tuple[nn.Module, Any, Any] = copy.deepcopy((module, args, kwargs), memo)
    return memo, *new


@contextmanager
def _other_random_numbers_kept() -> Iterator[None]:
    """Those of Python and numpy."""
    numpy = sys.modules.get("numpy.random")
    state, of_numpy = random.getstate(), None if numpy is None else numpy.get_state()
    try:
        yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.set_state(of_numpy)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _finite(values: Any) -> bool:
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

    with _silence():
        map_tensors(values, look)
    return finite


def _dtypes(values: Any) -> list[str]:
    """The floating dtypes in a nested value."""
    found: dict[str, None] = {}

    def look(tensor: Tensor) -> Tensor:
        found[short(tensor.dtype)] = None
        return tensor

    map_tensors(values, look)
    return list(found)


def _compute_dtype(func: Any, name: str, values: Any, out: Any) -> str | None:
    """The dtype that an op computes in: that of its floating inputs, promoted; None for a move.

    Tensors without dimensions do not count beside others, as in torch's own promotion.
    """
    returns = func._schema.returns
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    if view or name in _MOVES or "_pad" in name:
        return None
    if isinstance(out, Tensor) and not _dtypes(out):
        return None  # a comparison, or a search for places
    found: dict[bool, torch.dtype] = {}

    def look(tensor: Tensor) -> Tensor:
        small = tensor.dim() == 0
        known = found.get(small, tensor.dtype)
        found[small] = torch.promote_types(known, tensor.dtype)
        return tensor

    map_tensors(values, look)
    dtype = found.get(False, found.get(True))
    return None if dtype is None else short(dtype)


def _loses_nothing(seen: _Seen, row: ModuleRow | None) -> bool:
    """Whether a pin whose module only moves data casts to a wider dtype and back, if at all."""
    names = row.dtype_in + row.dtype_out if row is not None else []
    dtypes = [getattr(torch, name) for name in names]
    dtypes += [value.dtype for _, value in reads.own_floats(seen.module)]
    want = seen.rule.dtype
    wider = all(torch.promote_types(dtype, want) is want for dtype in dtypes)
    return not seen.bytes or (wider and seen.rule.output == "restore")


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


def _running_method(seen: _Seen) -> str | None:
    """The method of a module that is running now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code in seen.codes and frame.f_locals.get(code.co_varnames[0]) is seen.module:
            return code.co_name
        frame = frame.f_back
    return None


def _quoted(name: str) -> str:
    return repr(name) if name else "the root"
