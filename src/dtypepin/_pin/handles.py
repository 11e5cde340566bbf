"""What ``apply`` hands out: a view of the pins, without power to keep a model alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import overload

import torch
from torch import Tensor, nn
from typing_extensions import Self

from dtypepin._base.dtypes import short
from dtypepin._base.errors import PinError, warn
from dtypepin._base.selection import parts
from dtypepin._pin import frames, hooks, owners, reads, storage
from dtypepin._pin.hooks import Pin
from dtypepin._pin.rows import Row, parameters_kind, table


class PinHandle:
    """One pinned method of one module.

    It does not keep the model alive.

    Attributes:
        name: the module's dotted name, wrapper prefixes removed; ``""`` for the root.
        names: all its names, where it is shared.
        class_name: the name of its class.
        method: ``"forward"`` or the other method's name.
        dtype: the dtype that it computes in.
    """

    def __init__(
        self,
        module: nn.Module,
        pin: Pin,
        names: tuple[str, ...],
        class_name: str,
    ) -> None:
        self._module = weakref.ref(module)
        self._pin = pin  # it knows no module, so it keeps no model alive
        self.name, self.names, self.class_name = names[0], names, class_name
        self.method, self.dtype = pin.method, pin.dtype
        self._removed = False
        pin.holders += 1

    @property
    def module(self) -> nn.Module | None:
        """The pinned module, or None once it is gone."""
        return self._module()

    @property
    def active(self) -> bool:
        """Whether the pin stands on the module, and no later one counts instead."""
        module = self._module()
        if self._removed or module is None:
            return False
        return self._pin.active and _stands(module, self._pin)

    @property
    def ran(self) -> bool:
        """Whether the pinned method was called at all while it was pinned."""
        return self._pin.ran

    def remove(self) -> None:
        """Take this pin off again; a second time does nothing.

        Where the same pin was applied twice, it stands until both handles are removed.
        """
        owners.warn_if_owned(self._remove())

    def _remove(self) -> list[Tensor]:
        module, pin = self._module(), self._pin
        changed: list[Tensor] = []
        if not self._removed and module is not None and _stands(module, pin):
            if pin.holders <= 1:
                changed = remove(module, pin)
            pin.holders -= 1
        self._removed = True  # not before: what failed can be tried again
        return changed

    def row(self) -> Row:
        """This pin as a line of the table."""
        module, pin = self._module(), self._pin
        kind = "removed"
        if module is not None and not self._removed and _stands(module, pin):
            kind = parameters_kind(module, pin.dtype, pin.override)
        return Row(self.name, self.class_name, self.method, self.dtype, kind, self.names[1:])

    def __repr__(self) -> str:
        return (
            f"PinHandle({self.name!r}, {self.class_name}, {self.method}, {short(self.dtype)}"
            f"{'' if self.active else ', not active'})"
        )


class PinHandles(Sequence[PinHandle]):
    """The pins of one ``apply``: a sequence of handles, and a context manager that removes them.

    ``print`` shows them as a table, and names those that were not called while others were. It
    does not keep the model alive.

    Example:
        >>> import torch, dtypepin
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)).bfloat16()
        >>> pins = dtypepin.apply(model, class_patterns="LayerNorm")
        >>> print(pins)
        name  class      method   dtype    parameters
        1     LayerNorm  forward  float32  cast per call
        >>> pins.remove()
        >>> pins[0].active
        False
    """

    def __init__(self, handles: Sequence[PinHandle]) -> None:
        self._handles = tuple(handles)

    @overload
    def __getitem__(self, index: int) -> PinHandle: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PinHandle]: ...
    def __getitem__(self, index: int | slice) -> PinHandle | Sequence[PinHandle]:
        return self._handles[index]

    def __len__(self) -> int:
        return len(self._handles)

    def __iter__(self) -> Iterator[PinHandle]:
        return iter(self._handles)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Take all these pins off again, exactly; a second time does nothing.

        Hooks, the modules' ``__dict__`` and parameter dtypes and bits are what they were. A call
        that is running meanwhile, here or in another thread, ends as it began; its module's pin
        goes when it ends.
        Parameters that were trained meanwhile keep what they learned, in their old dtype.

        Raises:
            PinError: some could not be removed, for one because memory ran out; all others were.
                They still stand, and can be removed again.

        Warns:
            PinWarning: stored parameters were wrapped with DDP or sharded meanwhile. Under DDP
                they get their old dtype back, but its gradient buckets are laid out in the pin's;
                sharded ones stay in the pin's dtype.
        """
        errors: list[str] = []
        changed: list[Tensor] = []
        for handle in reversed(self._handles):
            try:
                changed += handle._remove()
            except Exception as error:  # one that fails must not keep the others on
                errors.append(f"{handle.name!r}: {type(error).__name__}: {error}")
        owners.warn_if_owned(changed)
        if errors:
            raise PinError("could not be removed: " + "; ".join(errors))

    def disabled(self) -> AbstractContextManager[None]:
        """Switch these pins off for a block, in this thread only.

        Stored parameters read as the dtype they have without the pin.

        Example:
            >>> import torch, dtypepin
            >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4)).bfloat16()
            >>> pins = dtypepin.apply(model, "0", dtype="float32", output="keep")
            >>> x = torch.zeros(1, 4, dtype=torch.bfloat16)
            >>> with pins.disabled():
            ...     model(x).dtype
            torch.bfloat16
            >>> model(x).dtype
            torch.float32
        """
        return frames.disabled([handle._pin for handle in self._handles])

    def check(self) -> list[str]:
        """Cast stored parameters back that somebody has cast since, as ``model.half()`` does.

        A pin computes in its dtype also without this; but digits that such a cast has cut off
        are lost. What DDP or ``fully_shard`` owns meanwhile stays as it is. Pins without
        ``override_parameters`` store nothing and are not looked at.

        Returns:
            The dotted names of the parameters and buffers that had drifted.

        Warns:
            PinWarning: something had drifted; once, naming all of it.
        """
        found = [
            (f"{handle.name}.{name}" if handle.name else name, value, stored)
            for handle in self._handles
            if (module := handle.module) is not None and not handle._removed
            for name, value, stored in storage.drifted(module)
        ]
        theirs = owners.owned([value for _, value, _ in found])
        drifted: dict[str, str] = {}
        owned: dict[str, str] = {}
        cut = False
        for name, value, stored in found:
            if value.dtype is stored.settled:
                continue  # tied to one before
            text = f"{name} ({short(value.dtype)}, expected {short(stored.settled)})"
            if id(value) in theirs:
                owned[name] = text
                continue
            drifted[name] = text
            cut |= torch.promote_types(value.dtype, stored.settled) is not value.dtype
            storage.repair(value, stored)
        if drifted:
            warn(
                f"stored parameters were cast since they were pinned: {', '.join(drifted.values())}"
                ". They are back in the pin's dtype"
                + (
                    ", but the digits which that cast cut off are lost; cast the model before "
                    "pinning it"
                    if cut
                    else ""
                )
            )
        if owned:
            warn(
                f"stored parameters were cast since they were pinned: {', '.join(owned.values())}. "
                "They stay so, because DistributedDataParallel owns them by now, or fully_shard; "
                "cast the model, pin it, and wrap it, in this order"
            )
        return [*drifted, *owned]

    def __str__(self) -> str:
        text = table([handle.row() for handle in self._handles])
        active = [handle for handle in self._handles if handle.active]
        waiting = [
            (handle.name or "(root)") + (f".{handle.method}" if handle.method != "forward" else "")
            for handle in active
            if not handle.ran
        ]
        if 0 < len(waiting) < len(active):  # before the first call there is nothing to say
            text += f"\nnot called so far: {', '.join(dict.fromkeys(waiting))}"
        return text

    def __repr__(self) -> str:
        return f"PinHandles([{', '.join(map(repr, self._handles))}])"


def remove(module: nn.Module, pin: Pin) -> list[Tensor]:
    """Take one pin off a module, exactly; the tensors that got another dtype come back.

    A call that is running at this moment ends as it began, and takes the pin off when it ends.
    """
    frames.current()  # forgets what Ctrl-C left behind, and with it the inputs of that call
    with hooks.changing:
        if frames.is_entered(pin):
            hooks.retire(module, pin, partial(remove, module, pin))
            return []
        changed = storage.release(module, pin)  # first: this alone can fail, and be tried again
        hooks.detach(module, pin)
        reads.uncover(parts(module), pin)
    return changed


def _stands(module: nn.Module, pin: Pin) -> bool:
    return any(pin is here for here in hooks.on_method(module, pin.method))
