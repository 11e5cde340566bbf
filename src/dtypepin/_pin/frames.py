"""The regions that each thread is in: rules, frames, and which of them still count.

What must be remembered from a region's beginning to its end is a ``Frame`` on a stack of the
running thread; nothing is written on the module.
"""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from dtypepin._base.dtypes import cast
from dtypepin._pin.casts import Cast, TracedCast

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


def where(rule: Rule) -> str:
    """``module 'blocks.0.norm'``, with the method where it is not forward."""
    name = f"module {rule.name!r}" if rule.name else "the root module"
    return name if rule.method == "forward" else f"{name}, method {rule.method!r}"


#: The dict of a module and the name in it under which somebody put a tensor, and what was there.
Displaced: TypeAlias = tuple[dict[str, Any], str, Tensor]


class Frame:
    """One region that was entered and not yet left.

    Attributes:
        rule: the pin whose region this is.
        owner: the Python frame that makes the call; while it runs, the region is alive. None
            where dynamo traces the call.
        dtype: parameters and buffers read as this dtype; None for the dtype they had unpinned.
        restore: dtype of floating outputs; None leaves them alone.
        device: device type on which autocast was on and is switched on again; None for none.
        home: the outermost of the regions of this dtype round it, where casts are kept.
        casts: parameters and buffers that were read in another dtype, by their ``id``.
        traced: buffers that were read so in a graph.
        displaced: parameters and buffers in whose place others were put.
    """

    __slots__ = (
        "casts",
        "device",
        "displaced",
        "dtype",
        "home",
        "owner",
        "restore",
        "rule",
        "traced",
    )

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
        self.home = self
        self.casts: dict[int, Cast] | None = None
        self.traced: list[TracedCast] | None = None
        self.displaced: list[Displaced] | None = None

    def put_back(self) -> None:
        """What was put in a tensor's place stays, in the dtype of what was there before."""
        for values, name, old in self.displaced or ():
            value = dict.get(values, name)
            if value is None or value is old:
                continue
            if isinstance(old, nn.Parameter) and not isinstance(value, nn.Parameter):
                dict.__setitem__(values, name, old)  # as a module refuses it
            elif value.dtype is self.dtype and value.dtype is not old.dtype:
                # ``self.weight = nn.Parameter(self.weight * 2)``, ``self.mean = new``
                with torch.no_grad():
                    new = cast(value.detach(), old.dtype)
                if isinstance(value, nn.Parameter):
                    new = nn.Parameter(new, value.requires_grad)
                dict.__setitem__(values, name, new)
        self.displaced = None


class _Life:
    """The frames of one thread, held by that thread alone: they go when it ends."""

    def __init__(self, frames: list[Frame]) -> None:
        self.frames = frames
        self.thread_id = threading.get_ident()


_lives: weakref.WeakSet[_Life] = weakref.WeakSet()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.disabled: list[frozenset[int]] = []
        self.life = _Life(self.frames)
        _lives.add(self.life)


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
    for life in list(_lives):
        owners = [frame.owner for frame in list(life.frames) if frame.rule is rule]
        if owners:
            top = _top(life.thread_id)  # None: the thread is gone
            if top and any(owner is None or is_running(owner, top) for owner in owners):
                return True
    return False


_asking = threading.RLock()


def _top(thread_id: int) -> FrameType | None:
    """The innermost Python frame of a thread."""
    if thread_id == threading.get_ident():
        return sys._getframe()
    # Up to Python 3.11 ``_current_frames`` holds a lock that a new thread needs: a collection in
    # it, whose finalizer lets another thread run, stops both for good.
    with _asking:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(thread_id)
        finally:
            if collects:
                gc.enable()


def let_go(rule: Rule) -> None:
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
        stale = frames.pop()  # autocast is never restored from it: it may be long after
        stale.put_back()
        if stale.rule.leaving is not None:
            let_go(stale.rule)
    return None


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
