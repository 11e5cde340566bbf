"""A callback for Lightning's ``Trainer``; needs ``lightning`` or ``pytorch_lightning``."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dtypepin._base.errors import PinError
from dtypepin._base.selection import Patterns
from dtypepin._pin.handles import PinHandles
from dtypepin._pin.settings import Inputs, Output, Settings
from dtypepin._pin.storage import kept
from dtypepin._pin.verbs import put_on

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    # The two packages hold two copies of every class: take the one that is in use.
    if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
        from pytorch_lightning import Callback
    else:
        try:
            from lightning.pytorch import Callback
        except ImportError:
            try:
                from pytorch_lightning import Callback
            except ImportError:
                raise ImportError(
                    "dtypepin.trainers.lightning needs lightning: pip install 'dtypepin[lightning]'"
                ) from None

__all__ = ["PinDtypeCallback"]


class PinDtypeCallback(Callback):
    """Pins modules of the LightningModule for each fit, validate, test and predict.

    The pins come off at the end of each, also on an exception and on Ctrl-C. It has no semantics
    of its own: they are those of :func:`dtypepin.apply`. It pins when the strategy has cast the
    model; with ``override_parameters=True`` before that, in ``setup``, so that a checkpoint is
    loaded into stored parameters and the optimizer sees them. Then layers that are made in
    ``configure_model`` are not there yet, and a pattern that only matches those is refused.

    Example:
        >>> from dtypepin.trainers.lightning import PinDtypeCallback  # doctest: +SKIP
        >>> callback = PinDtypeCallback(class_patterns="LayerNorm")  # doctest: +SKIP
        >>> Trainer(precision="bf16-mixed", callbacks=[callback]).fit(model)  # doctest: +SKIP
        >>> model.norm.weight.dtype  # doctest: +SKIP
        torch.float32

    Args:
        patterns: see :func:`dtypepin.apply`, as for all other arguments; names are those of the
            LightningModule.
        class_patterns: regexes for class names.
        dtype: the dtype to compute in.
        methods_to_override: names of methods.
        override_parameters: whether to store parameters in ``dtype``.
        inputs: ``"first"`` or ``"all"``.
        output: ``"restore"``, ``"keep"`` or a dtype.
        verbose: log the table of pins.

    Raises:
        PinError: an argument is not valid; when a stage starts, whatever ``apply`` refuses.
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
        # One trainer may run inside another.
        self._standing: list[_Standing] = []

    @property
    def state_key(self) -> str:
        """Tells Lightning several of these callbacks apart."""
        found = self.settings
        patterns = [pattern.pattern for pattern in (*found.patterns, *found.class_patterns)]
        return str(self._generate_state_key(patterns=patterns, methods=found.methods))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_standing": []}  # a copy has pinned nothing

    @property
    def pins(self) -> PinHandles | None:
        """The handles while they stand, else None."""
        return self._standing[-1].pins if self._standing else None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Pin before the strategy sets up, where parameters are stored in another dtype."""
        self._remove(trainer, pl_module)
        if self.settings.override:
            try:
                self._pin(trainer, pl_module)
            except PinError as error:
                raise PinError(f"{error}{_not_built_yet(pl_module)}") from None
        plugin: Any = trainer.precision_plugin
        if "convert_module" not in vars(plugin):
            # ``precision="bf16-true"`` casts the whole module there, and no hook is between that
            # and ``on_fit_start``, where tuners of the learning rate run already.
            plugin.convert_module = partial(_convert, trainer, pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pin for the fit; its validation is part of it."""
        self._pin(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pin, unless this is the validation of a fit."""
        if trainer.state.fn != "fit":
            self._pin(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pin for the test."""
        self._pin(trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pin for the prediction."""
        self._pin(trainer, pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the pins off."""
        self._remove(trainer, pl_module)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Take the pins off; Lightning calls no ``teardown`` here."""
        self._remove(trainer, pl_module)

    def _pin(self, trainer: Trainer, module: LightningModule) -> None:
        known = [one for one in self._standing if one.trainer() is trainer]
        if known and self.settings.override:
            known[0].pins.check()
            return
        # Again: the strategy may have wrapped the model meanwhile, in what is refused.
        pins = put_on(module, self.settings, self.verbose and not known)
        self._standing.append(_Standing(weakref.ref(trainer), weakref.ref(module), pins))
        self._drop(known)

    def _remove(self, trainer: Trainer, module: LightningModule) -> None:
        plugin = vars(trainer.precision_plugin)
        if getattr(plugin.get("convert_module"), "func", None) is _convert:
            del plugin["convert_module"]  # the stage ended before it was called
        self._drop([one for one in self._standing if one.is_over(trainer, module)])

    def _drop(self, entries: list[_Standing]) -> None:
        for one in entries:
            self._standing.remove(one)
            one.pins.remove()


class _Standing(NamedTuple):
    """Pins of one trainer on one module; a trainer may run inside another one."""

    trainer: weakref.ref[Trainer]
    module: weakref.ref[LightningModule]
    pins: PinHandles

    def is_over(self, trainer: Trainer, module: LightningModule) -> bool:
        """Whether they are this trainer's, or left on this module by one that runs no more."""
        theirs = self.trainer()
        if theirs is None or theirs is trainer:
            return True
        return self.module() in (module, None) and theirs.state.status != "running"


def _convert(trainer: Trainer, pinned: LightningModule, module: torch.nn.Module) -> torch.nn.Module:
    """Stands for ``convert_module`` of a trainer's precision plugin, for one call."""
    plugin: Any = trainer.precision_plugin
    del plugin.convert_module
    with kept(pinned.modules()):
        converted: torch.nn.Module = plugin.convert_module(module)
    for callback in trainer.callbacks:
        if isinstance(callback, PinDtypeCallback):
            callback._pin(trainer, pinned)
    return converted


def _not_built_yet(module: LightningModule) -> str:
    if type(module).configure_model.__module__.startswith(("lightning.", "pytorch_lightning.")):
        return ""  # it is not overridden
    return (
        "; what configure_model makes is not there yet when parameters are stored: make it in "
        "__init__, or leave override_parameters out"
    )
