"""What an audit remembers of each pin while it runs."""

from __future__ import annotations

from types import CodeType, FunctionType
from weakref import WeakKeyDictionary

from torch import nn

from dtypepin._audit.report import ModuleRow
from dtypepin._pin.frames import Rule
from dtypepin._pin.hooks import Pin


class Seen:
    """What was seen of one pin.

    The same pin put on again, as ``pin_dtype`` round every step does, is the same here.

    Attributes:
        module: the pinned module.
        row: what is seen of the module.
        rule: the pin's settings.
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
        codes: the code of the module's methods, looked for on the stack while it has not run.
    """

    def __init__(self, module: nn.Module, row: ModuleRow, pin: Pin) -> None:
        self.module, self.row, self.rule = module, row, pin
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
        self.codes: set[CodeType] = {
            value.__code__
            for kind in type(module).__mro__
            if kind is not nn.Module and issubclass(kind, nn.Module)
            for value in vars(kind).values()
            if isinstance(value, FunctionType) and value.__code__.co_argcount
        }


class Pins:
    """What was seen of every pin of the model, also of those that have come or gone since.

    Attributes:
        of_rule: by the pin; several pins that do the same share one.
    """

    def __init__(self) -> None:
        self.of_rule: WeakKeyDictionary[Rule, Seen] = WeakKeyDictionary()
        self._of_module: dict[nn.Module, list[Seen]] = {}
        self._ran_before: list[Pin] = []

    def get(self, pin: Rule | None) -> Seen | None:
        """What was seen of a pin; None where there is none, or it is not of this model."""
        return None if pin is None else self.of_rule.get(pin)

    def on(self, module: nn.Module) -> list[Seen]:
        """Of all pins on one module."""
        return self._of_module.get(module, [])

    def every(self) -> list[Seen]:
        """Of all pins."""
        return [seen for here in self._of_module.values() for seen in here]

    def begin(self, pin: Pin) -> None:
        """An audit begins: whether this pin has run before does not count in it."""
        if pin.ran:
            self._ran_before.append(pin)
            pin.ran = False

    def came(self, module: nn.Module, row: ModuleRow, pin: Pin) -> Seen | None:
        """A pin counts from now on; None if it does what one did that was there before."""
        for seen in self.on(module):
            if seen.rule.method == pin.method and pin.does_the_same_as(seen.rule):
                self.of_rule[pin] = seen
                return None
        self.of_rule[pin] = seen = Seen(module, row, pin)
        self._of_module.setdefault(module, []).append(seen)
        return seen

    def goes(self, pin: Pin) -> None:
        """A pin is about to go."""
        if pin in self.of_rule:
            self.of_rule[pin].ran |= pin.ran

    def end(self) -> None:
        """The audit ends: pins know again that they have run before."""
        for rule, seen in self.of_rule.items():
            seen.ran |= rule.ran
        for pin in self._ran_before:
            pin.ran = True


def quoted(name: str) -> str:
    """A module's name for a sentence."""
    return repr(name) if name else "the root"
