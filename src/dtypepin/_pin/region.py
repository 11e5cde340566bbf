"""Entering and leaving a pinned region: frames, autocast, casts. No hooks are known here.

A region is one call of a pinned module or method. What must be remembered from its beginning to
its end is a ``Frame`` on a stack of the running thread; nothing is written on the module.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from dtypepin._base.dtypes import CASTS, FLOATS, cast, map_changed, map_tensors, short
from dtypepin._base.errors import PinError
from dtypepin._base.torch_private import (
    any_autocast_enabled,
    autocast_outside,
    is_exporting,
    is_tracing,
)
from dtypepin._pin.buffers import BufferCast

if TYPE_CHECKING:
    from dtypepin._pin.reads import ParameterView

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

#: Tells pins, and wrappers of methods, from each other.
numbers = itertools.count()


class Rule:
    """What a region does: the settings of one pin.

    Attributes:
        dtype: the dtype that the region computes in.
        inputs: ``"first"`` or ``"all"``, which floating inputs are cast.
        output: ``"restore"``, ``"keep"`` or the dtype that floating outputs get.
        name: dotted name of the module when it was pinned, for messages only.
        method: ``"forward"`` or the name of the pinned method.
        active: False while a later pin on the same method counts instead.
        ran: whether a region of this pin was entered at all.
        leaving: what takes the pin off, once the calls that are running have ended.
        number: tells it from all others, copies of it too. Dynamo compares numbers, not objects.
    """

    leaving: Callable[[], object] | None = None

    def __init__(
        self,
        dtype: torch.dtype,
        inputs: Literal["first", "all"],
        output: torch.dtype | Literal["restore", "keep"],
        name: str,
        method: str,
    ) -> None:
        self.dtype = dtype
        self.inputs = inputs
        self.output = output
        self.name = name
        self.method = method
        self.active = True
        self.ran = False
        self.number = next(numbers)


class Frame:
    """One region that was entered and not yet left.

    Attributes:
        rule: the pin whose region this is.
        owner: the Python frame that makes the call; while it runs, the region is alive. None
            where dynamo traces the call.
        dtype: parameters and buffers read as this dtype; None for the dtype they had unpinned.
        restore: dtype of floating outputs; None leaves them alone.
        device: device type on which autocast was on and is switched on again; None for none.
        buffers: buffers that were first read in another dtype here, to be written back.
        displaced: parameters that were replaced by plain tensors, to be put back.
    """

    __slots__ = ("buffers", "device", "displaced", "dtype", "owner", "restore", "rule")

    def __init__(
        self,
        rule: Rule,
        owner: FrameType | None,
        dtype: torch.dtype | None,
        restore: torch.dtype | None,
        device: str | None,
    ) -> None:
        self.rule = rule
        self.owner = owner
        self.dtype = dtype
        self.restore = restore
        self.device = device
        self.buffers: list[BufferCast] | None = None
        self.displaced: list[tuple[ParameterView, str, nn.Parameter]] | None = None


#: The frames of every thread, by its identifier.
_frames_of_threads: dict[int, list[Frame]] = {}


class _Thread(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.disabled: list[frozenset[int]] = []
        for gone in _frames_of_threads.keys() - sys._current_frames().keys():
            _frames_of_threads.pop(gone, None)  # with what their last call was given
        _frames_of_threads[threading.get_ident()] = self.frames


#: Kinds of devices without autocast, for which ``torch.is_autocast_enabled`` is an error.
_WITHOUT_AUTOCAST = frozenset(
    kind
    for kind in ("lazy", "maia", "meta", "mps", "mtia", "vulkan")
    if not torch.amp.is_autocast_available(kind)
)

# Module-level, not on the pins: a threading.local can be neither pickled nor deep-copied.
thread = _Thread()


def is_alive(frame: Frame) -> bool:
    """Whether the call that entered this region is still running in this thread.

    KeyboardInterrupt and SystemExit skip torch's ``always_call`` hooks, so a frame can be left
    behind. It then must not count any more: it is recognised by its owner being off the stack.
    """
    return frame.owner is None or is_running(frame.owner)


def is_running(owner: FrameType, top: FrameType | None = None) -> bool:
    """Whether a Python frame is on the stack of this thread, or below the top of another's."""
    running: FrameType | None = top or sys._getframe(1)
    while running is not None:
        if running is owner:
            return True
        running = running.f_back
    return False


def is_entered(rule: Rule) -> bool:
    """Whether a call in a region of this rule is running, in any thread."""
    for thread_id, frames in list(_frames_of_threads.items()):
        owners = [frame.owner for frame in list(frames) if frame.rule is rule]
        if owners:
            top = sys._current_frames().get(thread_id)  # None: the thread is gone
            if top and any(owner is None or is_running(owner, top) for owner in owners):
                return True
    return False


def _let_go(rule: Rule) -> None:
    """Take a pin off that was removed while it was running, after its last call."""
    leaving = rule.leaving
    if leaving is not None and not is_entered(rule):
        rule.leaving = None
        leaving()


def current() -> Frame | None:
    """The innermost region that is alive in this thread; stale ones are discarded."""
    frames = thread.frames
    while frames:
        if is_alive(frames[-1]):
            return frames[-1]
        stale = frames.pop()  # discarded, never restored from: it may be long after
        if stale.rule.leaving is not None:
            _let_go(stale.rule)
    return None


def enter(
    rule: Rule,
    module: torch.nn.Module,
    args: Args,
    kwargs: Kwargs,
    owner: FrameType | None,
) -> tuple[Args, Kwargs] | None:
    """Enter a region: cast the inputs, push a frame, switch autocast off.

    Args:
        rule: the settings.
        module: the pinned module.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        owner: the Python frame that makes the call; None under dynamo.

    Returns:
        New arguments, or None where the old ones are right.
    """
    state = thread
    frames = state.frames
    if frames and owner is not None and not is_alive(frames[-1]):
        current()
    if not rule.active:
        return None
    if state.disabled and any(rule.number in block for block in state.disabled):
        if not frames:  # inside another pin's region that one counts
            frames.append(Frame(rule, owner, None, None, None))
        return None
    rule.ran = True
    dtype = rule.dtype
    cast_args = named = None
    if kwargs or len(args) > 1:
        named = _named_dtype(args, kwargs)
        if named is not None and named is not dtype:
            args, kwargs = cast_args = _name_dtype(args, kwargs, dtype)
    first = args[0] if args else None
    came = first.dtype if isinstance(first, Tensor) else None  # each ``.dtype`` takes 30 ns
    if rule.inputs == "all":
        first, new = _cast_all(args, kwargs, dtype)
        came = None if first is None else first.dtype
        cast_args = cast_args if new is None else new
    elif came not in FLOATS:
        first = _first(args, kwargs)
        came = None if first is None else first.dtype
    restore: torch.dtype | None
    if rule.output == "restore":
        restore = came or named
        if restore is None:
            restore = _parameter_dtype(module)
            if restore is not None and frames and frames[-1].dtype is not None:
                restore = frames[-1].dtype  # as its parameters would read in that region unpinned
    elif rule.output == "keep":
        restore = None
    else:
        restore = rule.output
    device = None
    if any_autocast_enabled():
        if first is None:
            kind = _device(args, kwargs, module)
        else:
            kind = "cpu" if first.is_cpu else first.device.type  # 20 ns, against 270
        if kind is not None and kind not in _WITHOUT_AUTOCAST and torch.is_autocast_enabled(kind):
            # Autocast leaves float64 alone, whatever a trace knows of it.
            traced = owner is not None and dtype is not torch.float64 and is_tracing()
            if traced or is_exporting():
                raise PinError(
                    f"torch.{'jit.trace' if traced else 'export'} under an active autocast does "
                    f"not record that autocast is off inside {where(rule)}: the program would not "
                    f"compute in {short(dtype)} there; do it outside of autocast, also of one that "
                    "the model opens itself, or take the pin off first"
                )
            device = kind
    if frames and frames[-1].dtype is not dtype:
        for known in _casts_of(frames):
            known.write_back()  # read in this dtype, it is another cast
    frame = Frame(rule, owner, dtype, restore, device)
    frames.append(frame)
    if device is not None:
        # Not ``torch.autocast(...).__enter__()``: it breaks fullgraph, and a KeyboardInterrupt
        # that skips its exit leaves autocast's weight cache alive, so old weights stay in use.
        if is_dynamo_compiling() and not autocast_outside(device):
            # The end of dynamo's trace restores what was before the first of these calls. Where
            # compiled code opened the autocast itself, that has to be made: off.
            with torch.autocast(device, enabled=False):
                torch.set_autocast_enabled(device, False)
        torch.set_autocast_enabled(device, False)
    if first is not None and came is not dtype and rule.inputs != "all":
        try:
            # Only now: the same cast costs twice as much with autocast on.
            cast_args = _replace(args, kwargs, first, CASTS[dtype](first))
        except BaseException:
            leave(frame, None)
            raise
    return cast_args


def leave(frame: Frame, output: Any) -> Any:
    """Leave a region: the frame and all stale ones above it go, the output gets its dtype.

    Args:
        frame: the frame that ``enter`` pushed.
        output: what the call returned, any nesting.

    Returns:
        The output with its floating tensors in the right dtype; the same object if they were.
    """
    frames = thread.frames
    while frames.pop() is not frame:
        pass
    try:
        if frame.buffers is not None:
            for known in frame.buffers:
                known.write_back()
        if frames and frames[-1].dtype is not frame.dtype:
            for known in _casts_of(frames):
                known.refresh()
        if frame.displaced is not None:
            for parameters, name, parameter in reversed(frame.displaced):
                parameters.put_back(name, parameter)
        restore = frame.restore
        if restore is None or output is None:
            return output
        if isinstance(output, Tensor):  # the common case costs no closure
            old = output.dtype
            return output if old is restore or old not in FLOATS else CASTS[restore](output)
        return map_tensors(output, lambda tensor: cast(tensor, restore))
    finally:
        if frame.device is not None:
            torch.set_autocast_enabled(frame.device, True)
        if frame.rule.leaving is not None:
            _let_go(frame.rule)


def find(rule: Rule, caller: FrameType | None) -> Frame | None:
    """The frame of this rule whose call is made, or was made until an error, by ``caller``.

    torch runs ``always_call`` hooks also when an earlier pre-hook raised and ours never ran;
    then there is no such frame, and somebody else's must stay.
    """
    for frame in reversed(thread.frames):
        if frame.rule is rule:
            owner = frame.owner
            if owner is None or owner is caller or owner.f_back is caller:
                return frame
    return None


@contextmanager
def disabled(rules: list[Rule]) -> Iterator[None]:
    """Switch rules off for a block, in this thread."""
    # Blocks may end in another order than they began, as coroutines do, and in another thread.
    blocks, block = thread.disabled, frozenset(rule.number for rule in rules)
    blocks.append(block)
    try:
        yield
    finally:
        blocks.remove(block)


def note(rule: Rule, args: Args, kwargs: Kwargs) -> str:
    """What to add to an exception that was raised in a region of this rule."""
    text = f"[dtypepin] raised inside {where(rule)}, pinned to {short(rule.dtype)}"
    return text + not_cast(rule, args, kwargs)


def not_cast(rule: Rule, args: Args, kwargs: Kwargs) -> str:
    """What to say of inputs that came into a region of this rule in another dtype, if any did."""
    left: dict[str, None] = {}
    if rule.inputs == "all":
        return ""

    def look(tensor: Tensor) -> Tensor:
        if tensor.dtype is not rule.dtype:
            left[short(tensor.dtype)] = None
        return tensor

    map_tensors((args, kwargs), look)
    if not left:
        return ""
    return (
        f'; other floating inputs were left in {", ".join(left)}: inputs="all" would cast them too'
    )


def where(rule: Rule) -> str:
    """``module 'blocks.0.norm'``, with the method where it is not forward."""
    name = f"module {rule.name!r}" if rule.name else "the root module"
    return name if rule.method == "forward" else f"{name}, method {rule.method!r}"


def _casts_of(frames: list[Frame]) -> list[BufferCast]:
    """Buffers read in another dtype in the innermost regions, as far out as they share one."""
    found: list[BufferCast] = []
    for frame in reversed(frames):
        if frame.dtype is not frames[-1].dtype:
            break
        found += frame.buffers or ()
    return found


def _named_dtype(args: Args, kwargs: Kwargs) -> torch.dtype | None:
    """The first floating dtype among the arguments themselves.

    ``norm(x, hidden_dtype=x.dtype)`` says what to compute in: diffusers' adaptive norms do.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.dtype) and value in FLOATS:
            return value
    return None


def _name_dtype(args: Args, kwargs: Kwargs, dtype: torch.dtype) -> tuple[Args, Kwargs]:
    """The arguments with the pin's dtype where one names a floating dtype."""
    return (
        tuple([dtype if _is_float(value) else value for value in args]),
        {key: dtype if _is_float(value) else value for key, value in kwargs.items()},
    )


def _is_float(value: object) -> bool:
    return isinstance(value, torch.dtype) and value in FLOATS


def _first(args: Args, kwargs: Kwargs) -> Tensor | None:
    """The first argument that is a floating tensor, positional before keyword."""
    for value in args:
        if isinstance(value, Tensor) and value.dtype in FLOATS:
            return value
    for value in kwargs.values():
        if isinstance(value, Tensor) and value.dtype in FLOATS:
            return value
    return None


def _replace(args: Args, kwargs: Kwargs, old: Tensor, new: Tensor) -> tuple[Args, Kwargs]:
    """Replace one tensor wherever the very same one is an argument."""
    if kwargs:
        kwargs = {key: new if value is old else value for key, value in kwargs.items()}
    elif len(args) == 1:
        return (new,), kwargs
    return tuple([new if value is old else value for value in args]), kwargs


def _cast_all(
    args: Args, kwargs: Kwargs, dtype: torch.dtype
) -> tuple[Tensor | None, tuple[Args, Kwargs] | None]:
    """The first floating tensor anywhere in the arguments, and the arguments all cast."""
    seen: list[Tensor] = []

    def cast_one(tensor: Tensor) -> Tensor:
        if not seen:
            seen.append(tensor)
        return cast(tensor, dtype)

    new = map_changed((args, kwargs), cast_one, {}, [])
    return (seen[0] if seen else None), new


def _parameter_dtype(module: torch.nn.Module) -> torch.dtype | None:
    """The dtype of the module's first floating parameter, or buffer, before it was pinned."""
    for holder in (module, *module.modules()):
        for views in (holder._parameters, holder._buffers):
            unpinned = getattr(views, "unpinned_dtype", None)
            for name, value in views.items():
                if value is not None and value.dtype in FLOATS:
                    found: torch.dtype = value.dtype if unpinned is None else unpinned(name)
                    return found
    return None


def _device(args: Args, kwargs: Kwargs, module: torch.nn.Module) -> str | None:
    """The device type of the first tensor argument, else of the first parameter or buffer.

    Where there is none at all, a device on which autocast is on.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.device.type
    kinds: list[str] = []

    def look(tensor: Tensor) -> Tensor:
        kinds.append(tensor.device.type)
        return tensor

    map_tensors((args, kwargs), look)  # a dict of tensors, as losses and matchers get
    if kinds:
        return kinds[0]
    for holder in module.modules():
        for values in (holder._parameters, holder._buffers):
            for value in values.values():
                if value is not None and value.device.type != "meta":
                    return value.device.type
                if value is not None:
                    kinds.append("meta")
    if kinds:
        return "meta"
    for kind in ("cuda", "xpu", "cpu"):
        if torch.is_autocast_enabled(kind):
            return kind
    return None
