"""What a pinned module computes in without pins: measured on a copy, not guessed."""

from __future__ import annotations

import copy
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dtypepin._audit.nonfinite import silence
from dtypepin._audit.ops import dtypes
from dtypepin._audit.seen import Seen
from dtypepin._base.model_state import random_numbers_kept
from dtypepin._base.nested import map_tensors
from dtypepin._pin import frames, hooks
from dtypepin._pin.frames import Rule

#: How often a pinned module is run without pins, under other circumstances each time.
_MOST_MEASURED = 8


class Hook:
    """A hook of an audit; in a copy or a pickle of the model it does nothing."""

    def __init__(self, function: Callable[..., object]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> None:
        self.function(*args)

    def __deepcopy__(self, memo: object) -> Hook:
        return Hook(_nothing)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (_nothing,)


def _nothing(*args: object) -> None:
    pass


class WithoutPins:
    """Runs copies of pinned modules with every pin off, and notes the dtypes of their ops.

    Attributes:
        running: whether such a run is under way.
    """

    def __init__(self, pins: MutableMapping[Rule, Seen]) -> None:
        self._pins = pins
        self._twins: dict[nn.Module, Seen] = {}  # copies of pinned modules, while one runs
        self._calls: list[nn.Module] = []
        self.running = False

    def is_new(self, seen: Seen, args: Any, kwargs: Any) -> bool:
        """Whether a pin was not measured yet under this autocast and with inputs of these dtypes.

        It counts as measured from now on.
        """
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds]
        circumstances = repr((autocast, dtypes((args, kwargs))))
        if circumstances in seen.measured or len(seen.measured) == _MOST_MEASURED:
            return False
        seen.measured.add(circumstances)
        return True

    def run(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """One forward of a copy, without pins."""
        try:
            with silence(), torch.no_grad():
                copies, twin, args, kwargs = _copy(module, args, kwargs)
        except Exception:
            return
        inside = [(seen, copies.get(id(seen.module))) for seen in self._pins.values()]
        self._twins = {part: seen for seen, part in inside if part is not None}
        self.running = True
        try:
            with (
                random_numbers_kept(module),
                _other_random_numbers_kept(),
                # Those of a checkpoint outside would keep what is saved here.
                torch.autograd.graph.saved_tensors_hooks(_same, _same),
                frames.disabled(list(self._pins)),
            ):
                twin(*args, **kwargs)
        except Exception as error:
            # Without pins dtypes may not fit: then they have an effect. Else it cannot be told.
            effect = any(word in str(error) for word in ("dtype", "scalar type", "same type"))
            for seen in self._twins.values():
                if seen.without is not None:
                    seen.without = {type(error).__name__} if effect else None
        finally:
            self.running = False
            self._twins = {}
            self._calls.clear()

    def enter(self, module: nn.Module) -> None:
        """A module in the copy is called."""
        self._calls.append(module)
        if module in self._twins and self._twins[module].without is None:
            self._twins[module].without = set()

    def leave(self) -> None:
        """A call of a module in the copy ends."""
        if self._calls:
            self._calls.pop()

    def op(self, dtype: str | None) -> None:
        """An op of the copy computes in this dtype."""
        for twin in self._calls:
            if dtype is not None and twin in self._twins:
                self._twins[twin].without |= {dtype}  # type: ignore[operator]


def not_measured(every: list[Seen]) -> list[str]:
    """The names of modules whose pins ran, and of which it is not known what they do without."""
    names: dict[str, None] = {}
    for seen in every:
        here = seen.calls or seen.ops or seen.rule.method != "forward"
        if seen.ran and here and seen.without is None:
            names[seen.row.name] = None
    return list(names)


def _copy(module: nn.Module, args: Any, kwargs: Any) -> tuple[dict[int, Any], nn.Module, Any, Any]:
    """A copy of a module, with the same hooks but those of audits, and one of its arguments.

    Before them, the copy of every part by the part's ``id``.
    """
    memo: dict[int, Any] = {}
    for part in module.modules():
        for pin in hooks.on(part):
            memo[id(pin)] = pin
        for kind in (part._forward_pre_hooks, part._forward_hooks):
            memo[id(kind)] = OrderedDict(
                (key, hook) for key, hook in kind.items() if not isinstance(hook, Hook)
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
