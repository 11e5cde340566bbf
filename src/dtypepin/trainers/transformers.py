"""A callback for the ``Trainer`` of Hugging Face transformers."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import Self

from dtypepin._base.errors import PinError, warn
from dtypepin._base.selection import Patterns
from dtypepin._pin.handles import PinHandles
from dtypepin._pin.settings import Inputs, Output, Settings
from dtypepin._pin.verbs import put_on

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
else:
    try:
        from transformers import TrainerCallback
    except ImportError:
        raise ImportError(
            "dtypepin.trainers.transformers needs transformers: "
            "pip install 'dtypepin[transformers]'"
        ) from None

__all__ = ["PinDtypeCallback"]


class PinDtypeCallback(TrainerCallback):
    """Pins modules of the Trainer's model for a training, or for a ``with`` block.

    As a callback alone it pins from the beginning of ``train()`` to its end. transformers calls no
    callback when ``train()`` ends with an exception; the pins then stay until the next ``train()``
    or ``remove()``. So use it as a context manager, which always takes them off, and which holds
    for ``evaluate()`` and ``predict()`` in the block too. It has no semantics of its own: they are
    those of :func:`dtypepin.apply`.

    Example:
        >>> from dtypepin.trainers.transformers import PinDtypeCallback  # doctest: +SKIP
        >>> callback = PinDtypeCallback(class_patterns="LayerNorm")  # doctest: +SKIP
        >>> trainer = Trainer(model, args, callbacks=[callback], ...)  # doctest: +SKIP
        >>> with callback:  # doctest: +SKIP
        ...     trainer.train()
        >>> model.norm.weight.dtype  # doctest: +SKIP
        torch.float32

    Args:
        patterns: see :func:`dtypepin.apply`, as for all other arguments.
        class_patterns: regexes for class names.
        dtype: the dtype to compute in.
        methods_to_override: names of methods.
        override_parameters: whether to store parameters in ``dtype``. Use the context manager
            then: the pins have to stand before a checkpoint is loaded and the model is wrapped.
        inputs: ``"first"`` or ``"all"``.
        output: ``"restore"``, ``"keep"`` or a dtype.
        verbose: log the table of pins.

    Raises:
        PinError: an argument is not valid; when it pins, whatever ``apply`` refuses, and
            ``override_parameters=True`` where the optimizer has state in another dtype already.
    """

    def __init__(
        self,
        patterns: Patterns = None,
        class_patterns: Patterns = None,
        dtype: torch.dtype | str = "float32",
        *,
        methods_to_override: Sequence[str] | str = ("forward",),
        override_parameters: bool = False,
        inputs: Inputs = "first",
        output: Output = "restore",
        verbose: bool = False,
    ) -> None:
        self.settings = Settings(
            patterns,
            class_patterns,
            dtype,
            methods_to_override,
            override_parameters,
            inputs,
            output,
        )
        self.verbose = verbose
        self._models: list[weakref.ref[nn.Module]] = []  # of the Trainers that it was given to
        self._standing: list[tuple[weakref.ref[nn.Module], PinHandles]] = []
        self._blocks = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_models": [], "_standing": [], "_blocks": 0}

    @property
    def pins(self) -> list[PinHandles]:
        """The handles while they stand, the oldest first."""
        return [pins for _, pins in self._standing]

    def __enter__(self) -> Self:
        models = [model for ref in self._models if (model := ref()) is not None]
        if not models:
            raise PinError(
                "got no model, expected a Trainer that was made with callbacks=[this one], before "
                "the with block"
            )
        before = len(self._standing)
        for model in models:
            try:
                self._pin(model)
            except PinError as error:
                if model is models[-1]:
                    self._remove(self._standing[before:])
                    raise
                warn(f"an older Trainer's {type(model).__name__} is not pinned: {error}")
        self._blocks += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._blocks -= 1
        if not self._blocks:
            self.remove()

    def remove(self) -> None:
        """Take the pins off; a second time does nothing."""
        self._remove(self._standing[:])

    def _remove(self, entries: list[tuple[weakref.ref[nn.Module], PinHandles]]) -> None:
        for entry in reversed(entries):
            self._standing.remove(entry)
            entry[1].remove()

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remember the model of the Trainer, for the ``with`` block."""
        if kwargs.get("model") is not None:  # there is none yet with ``model_init``
            self._models.append(weakref.ref(kwargs["model"]))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Pin, unless a ``with`` block has."""
        model = kwargs["model"]
        state_of = getattr(kwargs.get("optimizer"), "state", None)
        self._pin(model)
        if self.settings.override and _disagrees(state_of or {}):
            self._remove(self._standing[-1:])
            raise PinError(
                "override_parameters=True: got an optimizer with state, of a resumed training, "
                "whose dtype would no longer be that of the parameters; expected none. Pin "
                "earlier: with callback: trainer.train(...)"
            )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the pins of this model off, unless a ``with`` block stands."""
        if not self._blocks:
            self._remove([one for one in self._standing if one[0]() in (kwargs["model"], None)])

    def _pin(self, model: nn.Module) -> None:
        # What is pinned already is not pinned twice; ``model_init`` brings a new model.
        self._standing.append((weakref.ref(model), put_on(model, self.settings, self.verbose)))


def _disagrees(state: Mapping[Any, Any]) -> bool:
    """Whether an optimizer has moments in another dtype than that of their parameter."""
    return any(
        isinstance(value, torch.Tensor)
        and value.shape == parameter.shape
        and value.is_floating_point()
        and value.dtype is not parameter.dtype
        for parameter, values in state.items()
        if isinstance(parameter, torch.Tensor) and isinstance(values, Mapping)
        for value in values.values()
    )
