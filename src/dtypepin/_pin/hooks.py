"""The pin as it stands on a module: a pair of forward hooks, or a wrapper of another method."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from dtypepin._base import dtypes, nested, torch_private
from dtypepin._base.errors import warn
from dtypepin._base.torch_private import (
    keep_out_of_dynamo_frames,
    renumber,
    run_by_dynamo,
    see_hooks,
)
from dtypepin._pin import arguments, casts, frames, methods, reads, region, standins, writes
from dtypepin._pin.arguments import Args, Kwargs
from dtypepin._pin.frames import Rule
from dtypepin._pin.methods import PinnedMethod


class Pin(Rule):
    """One pinned method of one module.

    It lives on the module and holds no reference to it, so a deep copy or a pickle of the model
    carries a working pin of its own.

    Attributes:
        override: whether the module's own parameters are stored in the pin's dtype.
        holders: how many handles stand for it.
        handles: torch's handles of the two hooks. They stay here because hook ids start over in
            a new process, where later registrations would overwrite an unpickled pin; a pickled
            handle moves torch's counter past its own id.
    """

    def __init__(self, *args: Any, override: bool) -> None:
        super().__init__(*args)
        self.override = override
        self.holders = 0
        self.handles: tuple[RemovableHandle, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        # On a child that outlived its pinned parent: a handle of what is gone cannot be copied.
        alive = tuple(handle for handle in self.handles if handle.hooks_dict_ref() is not None)
        return {**self.__dict__, "handles": alive}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.number = next(frames.numbers)
        if not run_by_dynamo():  # dynamo copies hooks, and nothing may be dropped meanwhile
            see_hooks()  # a copy, perhaps in another process

    def does_the_same_as(self, other: Pin) -> bool:
        """Whether two pins of one method differ in nothing but their names."""
        return (self.dtype, self.inputs, self.output, self.override) == (
            other.dtype,
            other.inputs,
            other.output,
            other.override,
        )

    def before(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        """The forward pre-hook."""
        owner = None if is_dynamo_compiling() else sys._getframe(1)
        if owner is not None and not self.ran and "_original_forward" in module.__dict__:
            warn(
                f"{frames.where(self)}: Accelerate's mixed precision wraps the forward of this "
                "very module, and its autocast counts inside the pin. Pin the children instead "
                f"(patterns={_children(self.name)!r}), or prepare it with mixed_precision='no'"
            )
        return region.enter(self, module, args, kwargs, owner)

    def after(self, module: nn.Module, args: Args, *rest: Any) -> Any:
        """The forward hook; also called, with None, after an exception.

        ``rest`` are the keyword arguments and the output; the output alone where another thread
        is just taking the pin off, for torch forgets first that the hook takes keywords.
        """
        output = rest[-1]
        caller = None if is_dynamo_compiling() else sys._getframe(1)
        stack = frames.thread.frames
        frame = stack[-1] if stack else None
        if frame is None or frame.rule is not self or frame.owner is not caller:
            frame = frames.find(self, caller)
            if frame is None:
                return None
        if output is None and frame.owner is not None:
            error = sys.exc_info()[1]
            if error is not None and _passed_through(error, frame.owner):
                region.add_note(error, self, args, rest[0] if len(rest) > 1 else {})
        return region.leave(frame, output)


#: The ids that the two hooks of pins have had so far, on whatever module.
_ids: list[tuple[int, int]] = []

#: Called with a module, a pin and whether it came or went, whenever one does.
watchers: list[Callable[[nn.Module, Pin, bool], object]] = []

#: Held by whoever changes what is pinned: a pin that was removed while it ran goes off in the
#: thread that ran it, whatever others do meanwhile.
changing = threading.RLock()


def on(module: nn.Module) -> Iterator[Pin]:
    """All pins that stand on a module, oldest first for each method."""
    yield from _on_call(module)
    for wrapper in methods.wrappers(module):
        yield from [pin for pin in wrapper.pins if isinstance(pin, Pin)]


def on_method(module: nn.Module, method: str) -> list[Pin]:
    """The pins that stand on one method of a module, oldest first; the last one counts."""
    if method == "forward":
        return _on_call(module)
    return [pin for pin in on(module) if pin.method == method]


def _on_call(module: nn.Module) -> list[Pin]:
    # After a deep copy or unpickling, ``hook.__self__`` is the copy's own pin.
    pins = (getattr(hook, "__self__", None) for hook in list(module._forward_pre_hooks.values()))
    return [pin for pin in pins if isinstance(pin, Pin) and pin.leaving is None]


def top(module: nn.Module, method: str) -> Pin | None:
    """The pin that counts for a method of a module."""
    pins = on_method(module, method)
    return pins[-1] if pins else None


def attach(module: nn.Module, pin: Pin) -> None:
    """Put a pin on its method; it counts from now on."""
    if pin.method == "forward":
        # Both kinds of hooks run in order of registration, so the second is put in front:
        # nested pins unwind from the inside. ``always_call``: also after an exception.
        before = module.register_forward_pre_hook(pin.before, with_kwargs=True)
        pin.handles = (before,)  # already known where the next line fails
        after = module.register_forward_hook(
            pin.after, with_kwargs=True, prepend=True, always_call=True
        )
        pin.handles = (before, after)
        _use_known_ids(module, before, after)
    else:
        wrapper = module.__dict__.get(pin.method)
        if not isinstance(wrapper, PinnedMethod):
            wrapper = PinnedMethod(module, pin.method)
            methods.standing.setdefault(module, WeakSet()).add(wrapper)
            module.__dict__[pin.method] = wrapper
        wrapper.pins.append(pin)
    _choose(module, pin.method)
    for watch in watchers:
        watch(module, pin, True)


def _use_known_ids(module: nn.Module, before: RemovableHandle, after: RemovableHandle) -> None:
    """Use hook ids again that pins had before, on this module or another: dynamo guards on them.

    So a step that pins anew is not compiled anew, and neither is each of many equal blocks.
    """
    for pair in _ids:
        if pair[0] not in module._forward_pre_hooks and pair[1] not in module._forward_hooks:
            renumber(before, pair[0])
            renumber(after, pair[1])
            return
    _ids.append((before.id, after.id))


def detach(module: nn.Module, pin: Pin) -> None:
    """Take a pin off its method; the one before it counts again."""
    for watch in watchers:
        watch(module, pin, False)
    for handle in pin.handles:
        handle.remove()
    pin.handles, pin.active = (), False
    for wrapper in methods.wrappers(module) if pin.method != "forward" else ():
        wrapper.pins = [here for here in wrapper.pins if here is not pin]
        if not wrapper.pins:
            wrapper.restore()
    _choose(module, pin.method)


def retire(module: nn.Module, pin: Pin, leaving: Callable[[], object]) -> None:
    """Let a pin count no more, but leave the hook that ends the calls which are running."""
    if pin.method != "forward":
        detach(module, pin)  # a wrapper ends its calls by itself
    pin.active, pin.leaving = False, leaving
    _choose(module, pin.method)


def _choose(module: nn.Module, method: str) -> None:
    """Of several pins on one method the latest counts."""
    pins = on_method(module, method)
    for pin in pins:
        pin.active = pin is pins[-1]
    see_hooks()


def _children(name: str) -> str:
    """A pattern for the children of the module of this name."""
    return rf"^{re.escape(name)}\.[^.]+$" if name else r"^[^.]+$"


def _passed_through(error: BaseException, owner: FrameType) -> bool:
    """Whether this error left the call that a frame of ours belongs to.

    The hook after a call that returned None looks the same otherwise, in an except block.
    """
    trace = error.__traceback__
    for _ in range(2):  # torch catches in the calling frame or in the one above it
        if trace is None:
            return False
        if trace.tb_frame is owner:
            return True
        trace = trace.tb_next
    return False


#: Whether compiled models with a graph break inside a pinned module keep their pins.
SAFE_ACROSS_GRAPH_BREAKS = keep_out_of_dynamo_frames(
    arguments,
    casts,
    dtypes,
    frames,
    methods,
    nested,
    reads,
    region,
    standins,
    torch_private,
    writes,
    sys.modules[__name__],
)
