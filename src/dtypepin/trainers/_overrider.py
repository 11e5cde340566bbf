"""A hook for trainers in the style of detectron2 and Pointcept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dtypepin._base.dtypes import short
from dtypepin._base.errors import PinError, warn
from dtypepin._base.selection import Patterns
from dtypepin._pin.handles import PinHandles
from dtypepin._pin.reads import own_floats
from dtypepin._pin.settings import Inputs, Output, Settings
from dtypepin._pin.verbs import logger, put_on


class DtypeOverrider:
    """Pin modules of ``trainer.model`` for the length of a training.

    The trainer sets ``self.trainer`` and calls ``before_train``, ``after_step`` and, in a
    ``finally``, ``after_train``; or it is MMEngine's runner and gives itself to each call. It does
    not import any framework and has no semantics of its own: the pins are those of
    :func:`dtypepin.apply`. It comes before hooks that make an optimizer, and before DDP wraps the
    model where ``override_parameters`` changes a dtype. A trainer that wants hooks of its own base
    class gets one by ``class Overrider(DtypeOverrider, HookBase): pass``. Where ``after_train`` is
    not called after an error, ``remove()`` or :func:`dtypepin.unpin` takes the pins off.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> from dtypepin.trainers import DtypeOverrider
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)).bfloat16()
        >>> hook = DtypeOverrider(class_patterns=["LayerNorm"], override_parameters=True)
        >>> hook.trainer = SimpleNamespace(model=model)
        >>> hook.before_train()
        >>> model[1].weight.dtype
        torch.float32
        >>> hook.after_train()
        >>> model[1].weight.dtype
        torch.bfloat16

    Args:
        patterns: regexes, searched in the dotted names; DDP and other wrappers are seen through.
        class_patterns: regexes, searched in the class names.
        dtype: float16, bfloat16, float32 or float64, as ``torch.dtype`` or by name.
        methods_to_override: a name or names of methods; None means ``["forward"]``.
        override_parameters: whether to store the matched modules' parameters in ``dtype``.
        verbose: log each pinned method and stored parameter, and a summary, to
            ``trainer.logger``; to the logger ``"dtypepin"`` where the trainer has none.
        check_interval: every so many steps, stored parameters that have drifted to another dtype
            are cast back, with a warning. 0 never checks.
        inputs: ``"first"`` or ``"all"``, as for :func:`dtypepin.apply`.
        output: ``"restore"``, ``"keep"`` or a dtype.

    Raises:
        PinError: an argument that is not valid, no pattern at all; in ``before_train``, whatever
            :func:`dtypepin.apply` refuses, and no match at all.

    Warns:
        PinWarning: some of the patterns match nothing; a stored parameter had drifted; a pinned
            method was not called in the whole training.
    """

    trainer: Any = None

    def __init__(
        self,
        patterns: Patterns = None,
        class_patterns: Patterns = None,
        dtype: torch.dtype | str = "float32",
        methods_to_override: Sequence[str] | str | None = None,
        override_parameters: bool = False,
        verbose: bool = False,
        check_interval: int = 10,
        *,
        inputs: Inputs = "first",
        output: Output = "restore",
    ) -> None:
        methods = ["forward"] if methods_to_override is None else methods_to_override
        self.settings = Settings(
            patterns, class_patterns, dtype, methods, override_parameters, inputs, output
        )
        # A bool is an int to Python, and True would check at every step.
        interval: Any = check_interval
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 0:
            raise PinError(
                f"check_interval: got {check_interval!r}, expected a number of steps, 0 for never"
            )
        self.patterns = self.settings.patterns
        self.class_patterns = self.settings.class_patterns
        self.dtype = self.settings.dtype
        self.methods_to_override = self.settings.methods
        self.inputs, self.output = inputs, output
        self.override_parameters = override_parameters
        self.verbose = verbose
        self.check_interval = check_interval
        self.pins: PinHandles | None = None
        self._steps = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__:
            if base is DtypeOverrider:
                break
            found = vars(base).get("before_train")
            if issubclass(base, DtypeOverrider):
                if found is not None:
                    break  # it knows what it does
            elif found is not None and not _calls_super(found):
                # The framework's own hook, which does nothing: no pin and no word of it.
                raise PinError(
                    f"got {base.__name__} before DtypeOverrider among the bases of "
                    f"{cls.__name__}, where its before_train counts; expected "
                    f"class {cls.__name__}(DtypeOverrider, {base.__name__})"
                )

    def before_train(self, runner: Any = None) -> None:
        """Pin the model; pins that are still on, for one of ``before_run``, are not doubled."""
        trainer = self.trainer if runner is None else runner
        if trainer is None:
            raise PinError("trainer: got None, expected the trainer to set it before before_train")
        model = getattr(trainer, "model", None)
        if not isinstance(model, nn.Module):
            raise PinError(
                f"trainer.model: got {type(model).__name__}, expected a torch.nn.Module, at "
                f"{type(trainer).__name__}"
            )
        before, self.pins, self._steps = self.pins, None, 0
        dtypes = [parameter.dtype for parameter in model.parameters()]
        try:
            self.pins = put_on(model, self.settings)
        finally:
            # Not first: stored parameters would lose the digits that their old dtype has not.
            if before is not None:
                before.remove()
        optimizer = getattr(trainer, "optimizer", None)
        if self.override_parameters and getattr(optimizer, "state", None):
            # State from before the pins is in the parameters' old dtype, which Adam refuses.
            optimizer.load_state_dict(optimizer.state_dict())  # type: ignore[union-attr]
            if before is None and dtypes != [parameter.dtype for parameter in model.parameters()]:
                warn(
                    "the optimizer has state already. If that is of a checkpoint which was saved "
                    "with these pins, its weights were rounded to the model's own dtype when they "
                    "were loaded, before the pins: call before_train() before loading it"
                )
        if self.verbose and before is None:
            _log(self.pins, self.settings, (getattr(trainer, "logger", None) or logger).info)

    def before_run(self, runner: Any) -> None:
        """Pin the model before MMEngine resumes; ``runner.val()`` and ``test()`` call it, too."""
        self.before_train(runner)

    def after_run(self, runner: Any) -> None:
        """Take the pins off."""
        self.after_train()

    def before_epoch(self) -> None:
        """Nothing; trainers call it."""

    def before_step(self) -> None:
        """Nothing; trainers call it."""

    def after_step(self) -> None:
        """Every ``check_interval`` steps, cast stored parameters back that have drifted."""
        self._steps += 1
        if self.pins is not None and self.check_interval and not self._steps % self.check_interval:
            self.pins.check()

    def after_train_iter(self, *_: Any, **__: Any) -> None:
        """What MMEngine calls ``after_step``."""
        self.after_step()

    def after_epoch(self) -> None:
        """Nothing; trainers call it."""

    def after_train(self, runner: Any = None) -> None:
        """Take the pins off; name those that were never called."""
        pins, steps = self.pins, self._steps
        self.remove()
        idle = [f"{pin.name or '(root)'}.{pin.method}" for pin in pins or () if not pin.ran]
        if steps and idle:
            warn(
                f"pinned, but not called in {steps} steps: {', '.join(idle)}. A parent that reads "
                "a child's weight without calling it, or calls child.forward(x), goes past the "
                "pin: pin the parent"
            )

    def remove(self) -> None:
        """Take the pins off, if any are on; a second time does nothing."""
        pins, self.pins = self.pins, None
        if pins is not None:
            pins.remove()

    def __repr__(self) -> str:
        return (
            f"DtypeOverrider(patterns={[p.pattern for p in self.patterns]}, "
            f"class_patterns={[p.pattern for p in self.class_patterns]}, "
            f"dtype={short(self.dtype)!r}, methods_to_override={self.methods_to_override}, "
            f"override_parameters={self.override_parameters}, verbose={self.verbose}, "
            f"check_interval={self.check_interval}, inputs={self.inputs!r}, "
            f"output={self.output!r})"
        )


def _log(pins: PinHandles, settings: Settings, info: Callable[[str], object]) -> None:
    """Each pinned method, each stored parameter, and a summary."""
    stored: set[int] = set()  # by identity: two pinned methods or modules may share one
    dtype = short(settings.dtype)
    for pin in pins:
        name = pin.name or "(root)"
        info(f"pinned {name}.{pin.method} ({pin.class_name}) to {dtype}")
        if not settings.override or pin.module is None:
            continue
        for parameter, value in own_floats(pin.module):
            if id(value) not in stored:
                stored.add(id(value))
                info(f"stored {name}.{parameter} in {dtype}")
    info(f"{len(pins)} methods pinned to {dtype}, {len(stored)} parameters stored in it")


def _calls_super(method: object) -> bool:
    return "super" in getattr(getattr(method, "__code__", None), "co_names", ())
