"""Why a pin has not run although its module is in use."""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

from dtypepin._audit.nonfinite import Call
from dtypepin._audit.seen import Seen, quoted
from dtypepin._pin.reads import own_floats


class Causes:
    """Looks at ops for the weights, and at the stack for the code, of modules whose pin is idle."""

    def __init__(self) -> None:
        self._weights: dict[int, list[Seen]] = {}  # by the ``id`` of what a module owns
        self._weightless: dict[int, list[Seen]] = {}  # those of modules that own nothing
        self._codes: set[CodeType] = set()

    def expect(self, seen: Seen) -> None:
        """Look out for the module of this pin."""
        self._codes |= seen.codes
        floats = [value for _, value in own_floats(seen.module)]
        for value in floats:
            self._weights.setdefault(id(value), []).append(seen)
        if not floats:
            self._weightless.setdefault(id(seen.module), []).append(seen)

    def look(self, args: tuple[Any, ...], calls: list[Call]) -> None:
        """An op runs on these arguments in the last of these calls."""
        for value in args:
            for seen in self._weights.get(id(value), ()):
                own = calls[-1].module
                if own is seen.module or all(value is not v for _, v in own_floats(own)):
                    _explain(seen, _running_method(seen), calls)  # else it is tied
        if self._weightless:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None:
                code = frame.f_code
                if code in self._codes:
                    module = frame.f_locals.get(code.co_varnames[0])
                    for seen in self._weightless.get(id(module), ()):
                        _explain(seen, code.co_name, calls)
                frame = frame.f_back


def _explain(seen: Seen, running: str | None, calls: list[Call]) -> None:
    """Note why a pin has not run, while a method of its module is running, or none is."""
    pin = seen.rule
    under_way = pin.method == "forward" and any(call.module is seen.module for call in calls)
    if pin.ran or seen.ran or seen.cause or under_way:
        return
    caller = calls[-1].row
    who = quoted(caller.name) if caller is not None else "a module outside the model"
    if running == pin.method == "forward":
        seen.cause = f"called through .forward() by {who}: call the module itself"
    elif running is None:
        seen.cause = f"{who} reads its weight and does not call it: pin that one"
    elif running != pin.method:
        seen.cause = f"its {running!r} ran: pin it with methods_to_override"


def _running_method(seen: Seen) -> str | None:
    """The method of a module that is running now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code in seen.codes and frame.f_locals.get(code.co_varnames[0]) is seen.module:
            return code.co_name
        frame = frame.f_back
    return None
