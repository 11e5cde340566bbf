"""Entering and leaving a pinned region, which is one call of a pinned module or method."""

from __future__ import annotations

from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from dtypepin._base.dtypes import CASTS, FLOATS, cast, short
from dtypepin._base.errors import PinError
from dtypepin._base.nested import map_tensors
from dtypepin._base.torch_private import (
    any_autocast_enabled,
    autocast_outside,
    is_exporting,
    is_tracing,
)
from dtypepin._pin import arguments, writes
from dtypepin._pin.arguments import Args, Kwargs
from dtypepin._pin.frames import Frame, Rule, current, is_alive, let_go, thread, where

#: Kinds of devices without autocast, for which ``torch.is_autocast_enabled`` is an error.
_WITHOUT_AUTOCAST = frozenset(
    kind
    for kind in ("lazy", "maia", "meta", "mps", "mtia", "vulkan")
    if not torch.amp.is_autocast_available(kind)
)


def enter(
    rule: Rule,
    module: nn.Module,
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
        named = arguments.named_dtype(args, kwargs)
        if named is not None and named is not dtype:
            args, kwargs = cast_args = arguments.name_dtype(args, kwargs, dtype)
    first = args[0] if args else None
    came = first.dtype if isinstance(first, Tensor) else None  # each ``.dtype`` takes 30 ns
    if rule.inputs == "all":
        first, new = arguments.cast_all(args, kwargs, dtype)
        came = None if first is None else first.dtype
        cast_args = cast_args if new is None else new
    elif came not in FLOATS:
        first = arguments.first(args, kwargs)
        came = None if first is None else first.dtype
    restore: torch.dtype | None
    if rule.output == "restore":
        restore = came or named
        if restore is None:
            restore = arguments.parameter_dtype(module)
            if restore is not None and frames and frames[-1].dtype is not None:
                restore = frames[-1].dtype  # as its parameters would read in that region unpinned
    elif rule.output == "keep":
        restore = None
    else:
        restore = rule.output
    device = None
    if any_autocast_enabled():
        if first is None:
            kind = arguments.device(args, kwargs, module)
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
    frame = Frame(rule, owner, dtype, restore, device)
    if frames:
        outer = frames[-1]
        if outer.dtype is dtype:
            frame.home = outer.home
        else:
            writes.write_back(outer)  # read in this dtype, it is another cast
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
            cast_args = arguments.replace(args, kwargs, first, CASTS[dtype](first))
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
        if frame.casts is not None or frame.traced is not None or frame.displaced is not None:
            writes.settle(frame)
        if frames and frames[-1].dtype is not frame.dtype:
            writes.refresh(frames[-1])
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
            let_go(frame.rule)


def note(rule: Rule, args: Args, kwargs: Kwargs) -> str:
    """What to add to an exception that was raised in a region of this rule."""
    text = f"[dtypepin] raised inside {where(rule)}, pinned to {short(rule.dtype)}"
    return text + arguments.not_cast(rule, args, kwargs)


def add_note(error: BaseException, rule: Rule, args: Args, kwargs: Kwargs) -> None:
    """Name the pinned module in an exception, once; Python 3.10 has no notes."""
    notes = getattr(error, "__notes__", ())
    if hasattr(error, "add_note") and not any("[dtypepin]" in text for text in notes):
        error.add_note(note(rule, args, kwargs))
