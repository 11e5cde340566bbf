"""The wrapper that pins a method other than forward."""

from __future__ import annotations

import inspect
import sys
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from torch.compiler import is_dynamo_compiling

from dtypepin._pin import frames, region
from dtypepin._pin.frames import Rule

#: The wrappers of a module that are still in use somewhere.
standing: WeakKeyDictionary[nn.Module, WeakSet[PinnedMethod]] = WeakKeyDictionary()


class PinnedMethod:
    """Stands in a module's ``__dict__`` for a method other than forward.

    It finds the method anew at each call, from the class or from what stood there before, so a
    deep copy runs its own weights.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.name = name
        self.had = name in module.__dict__
        self.previous = module.__dict__.get(name)
        self.pins: list[Rule] = []
        self.number = next(frames.numbers)

    @property
    def __wrapped__(self) -> Any:
        """The method without the pin; ``inspect.signature`` looks here."""
        if self.had:
            return self.previous
        kind = type(self.module)
        for base in kind.__mro__:
            if self.name in base.__dict__:
                found = base.__dict__[self.name]
                return found.__get__(self.module, kind) if hasattr(found, "__get__") else found
        raise AttributeError(f"{kind.__name__!r} object has no attribute {self.name!r}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method = self.__wrapped__
        pin = self.pins[-1] if self.pins else None
        if pin is None:  # unpinned while somebody's patch on top held on to us
            self.restore()
            return method(*args, **kwargs)
        owner = None if is_dynamo_compiling() else sys._getframe(0)
        output = None
        try:
            new = region.enter(pin, self.module, args, kwargs, owner)
            if new is not None:
                args, kwargs = new
            output = method(*args, **kwargs)
        except Exception as error:
            if not is_dynamo_compiling():
                region.add_note(error, pin, args, kwargs)
            raise
        finally:
            frame = frames.find(pin, owner)
            if frame is not None:
                output = region.leave(frame, output)
        return output

    def restore(self) -> None:
        """Put back what was there, if it is still we who stand there."""
        if self.module.__dict__.get(self.name) is self:
            if self.had:
                self.module.__dict__[self.name] = self.previous
            else:
                del self.module.__dict__[self.name]


def can_wrap(module: nn.Module, name: str) -> bool:
    """Whether a module has a method of this name that can be pinned.

    Not a child, not a property, and not what only ``__getattr__`` hands on from elsewhere.
    """
    if name == "forward":
        return True  # pinned by hooks
    found = inspect.getattr_static(module, name, None)
    if found is None or hasattr(type(found), "__set__"):
        return False
    return callable(getattr(module, name))


def wrappers(module: nn.Module) -> list[PinnedMethod]:
    """Our wrappers on a module, oldest first, also those that somebody has patched over."""
    found = set(standing.get(module, ()))
    for value in module.__dict__.values():
        while isinstance(value, PinnedMethod):
            found.add(value)  # those of a copy are known from here only
            value = value.previous
    return sorted(found, key=lambda wrapper: wrapper.number)
