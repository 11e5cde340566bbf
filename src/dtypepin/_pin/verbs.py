"""The public verbs: apply, pin_dtype, select, unpin. The only file that knows all the others."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dtypepin._base.errors import warn
from dtypepin._base.selection import Named, Patterns, parts
from dtypepin._pin import frames, handles, hooks, owners, reads, storage
from dtypepin._pin.handles import PinHandle, PinHandles
from dtypepin._pin.hooks import Pin
from dtypepin._pin.methods import PinnedMethod
from dtypepin._pin.reads import ParameterView, Stored
from dtypepin._pin.rows import Selection
from dtypepin._pin.settings import Inputs, Output, Settings, Targets

logger = logging.getLogger("dtypepin")


def apply(
    model: nn.Module,
    patterns: Patterns = None,
    class_patterns: Patterns = None,
    dtype: torch.dtype | str = "float32",
    *,
    methods_to_override: Sequence[str] | str = ("forward",),
    override_parameters: bool = False,
    inputs: Inputs = "first",
    output: Output = "restore",
    verbose: bool = False,
) -> PinHandles:
    """Make chosen modules compute in a chosen dtype, until the returned handles are removed.

    The call of each matched module becomes a region, its children included: autocast is off in it
    for the device of its input, its first floating tensor input is cast, parameters and buffers
    read as ``dtype``, and floating outputs get the input's dtype back. The model's classes, methods
    and ``state_dict`` keys stay what they are. It does not reach ``module.forward(x)`` called
    directly, nor a parent that reads a child's weight without calling it.

    Example:
        >>> import torch, dtypepin
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)).bfloat16()
        >>> pins = dtypepin.apply(model, class_patterns="LayerNorm")
        >>> model(torch.zeros(2, 4, dtype=torch.bfloat16)).dtype
        torch.bfloat16
        >>> pins.remove()

    Args:
        model: the model; wrappers such as DDP and ``torch.compile`` are seen through.
        patterns: a regex or a list of them, searched (``re.search``) in the dotted names, wrapper
            prefixes removed. A module is chosen if any pattern of either kind finds it.
        class_patterns: the same, searched in the class name.
        dtype: float16, bfloat16, float32 or float64, as ``torch.dtype`` or by name.
        methods_to_override: ``"forward"`` is pinned by hooks, every other name by a wrapper with
            the same semantics. Modules without such a method are passed over.
        override_parameters: True stores the matched modules' own floating parameters and buffers
            in ``dtype`` while pinned; the Parameter objects stay the same. Pin before the
            optimizer has state, for its state keeps the dtype it was made in. False casts them
            for the call where they differ; what a forward writes in place to such a cast of a
            parameter (not of a buffer) is lost.
        inputs: ``"first"`` casts the first floating tensor argument, positional before keyword,
            and every other argument that is the very same tensor. ``"all"`` casts every floating
            tensor in the arguments, nested too, as always for a parametrization. With both, an
            argument that names a floating dtype names the pin's.
        output: ``"restore"`` gives floating outputs the first input's dtype back (the parameters'
            dtype where no floating tensor goes in), ``"keep"`` leaves them in ``dtype``, a dtype
            casts them to that one.
        verbose: log the table of pins to the logger ``"dtypepin"``.

    Returns:
        Handles of the new pins. ``print`` shows a table, ``remove()`` undoes everything.

    Raises:
        PinError: nothing matched, an argument is not valid, or a pin would do harm. The model is
            untouched then.

    Warns:
        PinWarning: one of several patterns matched nothing.

    Limits:
        Only tensors of 16, 32 and 64-bit floats are ever cast. An in-place module that is given a
        cast no longer changes the caller's tensor. Ctrl-C inside a pinned call, caught inside an
        autocast block, leaves autocast off for the rest of that block.
    """
    settings = Settings(
        patterns,
        class_patterns,
        dtype,
        methods_to_override,
        override_parameters,
        inputs,
        output,
    )
    return put_on(model, settings, verbose)


def put_on(model: nn.Module, settings: Settings, verbose: bool = False) -> PinHandles:
    """Pin what the settings mean; all of it or nothing."""
    with hooks.changing, _no_collection():
        targets = Targets(model, settings)
        made: list[PinHandle] = []
        known: dict[int, Stored] = {}
        with ExitStack() as undo:
            for found, method in targets.pairs:
                pin = hooks.top(found.module, method)
                new = targets.pin(found, method)
                if pin is None or not pin.does_the_same_as(new):
                    pin = new
                    undo.callback(handles.remove, found.module, pin)
                    _put(found, pin, known)
                else:
                    reads.cover(
                        _uncovered(found.module, pin), pin, found.module
                    )  # children added since
                made.append(PinHandle(found.module, pin, found.names, found.class_name))
            undo.pop_all()
        pins = PinHandles(made)
    if not hooks.SAFE_ACROSS_GRAPH_BREAKS and "torch._dynamo" in sys.modules:
        warn(
            f"torch {torch.__version__} does not let hooks be kept out of compiled frames: in a "
            "compiled model, a graph break inside a pinned module may lose its pin. Compile with "
            "fullgraph=True, or check what it computes in"
        )
    if verbose:
        logger.info("pinned %d of %s:\n%s", len(pins), type(model).__name__, pins)
    return pins


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pins are many small objects and no garbage; collecting would take most of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _put(found: Named, pin: Pin, known: dict[int, Stored]) -> None:
    """Change the model: views, storage, hooks, in an order that each can be undone."""
    module = found.module
    reads.cover(parts(module), pin, module)
    if pin.override:
        storage.store(module, pin, known)
    hooks.attach(module, pin)


def _uncovered(module: nn.Module, pin: Pin) -> list[nn.Module]:
    def covered(values: dict[str, Any]) -> bool:
        return isinstance(values, ParameterView) and any(pin is rule for rule in values.rules)

    return [
        part
        for part in parts(module)
        if not covered(part._parameters) and not covered(part._buffers)
    ]


class pin_dtype:
    """Pin chosen modules for a block: ``apply`` at its start, ``remove`` at its end.

    The arguments are those of :func:`apply`. The block also ends the pins on an exception and on
    Ctrl-C. It does not keep compiled code from being compiled once for the pinned model; pin once
    with ``apply`` where each step of a compiled model would enter and leave.

    Example:
        >>> import torch
        >>> from dtypepin import pin_dtype
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)).bfloat16()
        >>> with pin_dtype(model, patterns=["1"], output="keep"):
        ...     model(torch.zeros(2, 4, dtype=torch.bfloat16)).dtype
        torch.float32
        >>> model(torch.zeros(2, 4, dtype=torch.bfloat16)).dtype
        torch.bfloat16

    Args:
        model: see :func:`apply`, as for all other arguments.
        patterns: regexes for dotted names.
        class_patterns: regexes for class names.
        dtype: the dtype to compute in.
        methods_to_override: names of methods.
        override_parameters: whether to store parameters in ``dtype``.
        inputs: ``"first"`` or ``"all"``.
        output: ``"restore"``, ``"keep"`` or a dtype.
        verbose: log the table of pins.

    Raises:
        PinError: on entering, as :func:`apply` does.
    """

    def __init__(
        self,
        model: nn.Module,
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
        self._model = model
        self._arguments: dict[str, Any] = {
            "patterns": patterns,
            "class_patterns": class_patterns,
            "dtype": dtype,
            "methods_to_override": methods_to_override,
            "override_parameters": override_parameters,
            "inputs": inputs,
            "output": output,
            "verbose": verbose,
        }
        self._entered: list[PinHandles] = []

    def __enter__(self) -> PinHandles:
        self._entered.append(apply(self._model, **self._arguments))
        return self._entered[-1]

    def __exit__(self, *_: object) -> None:
        self._entered.pop().remove()
        frames.current()  # discards what a Ctrl-C may have left


def select(
    model: nn.Module,
    patterns: Patterns = None,
    class_patterns: Patterns = None,
    dtype: torch.dtype | str = "float32",
    *,
    methods_to_override: Sequence[str] | str = ("forward",),
    override_parameters: bool = False,
    inputs: Inputs = "first",
    output: Output = "restore",
    verbose: bool = False,
) -> Selection:
    """Show what :func:`apply` would pin with the same arguments. Nothing is changed.

    Example:
        >>> import torch, dtypepin
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
        >>> print(dtypepin.select(model, class_patterns="Norm"))
        name  class      method   dtype    parameters
        1     LayerNorm  forward  float32  as they are

    Args:
        model: see :func:`apply`, as for all other arguments.
        patterns: regexes for dotted names.
        class_patterns: regexes for class names.
        dtype: the dtype to compute in.
        methods_to_override: names of methods.
        override_parameters: whether to store parameters in ``dtype``.
        inputs: ``"first"`` or ``"all"``.
        output: ``"restore"``, ``"keep"`` or a dtype.
        verbose: log the table.

    Returns:
        The rows; ``print`` shows them as a table, ``names`` lists the dotted names.

    Raises:
        PinError: whatever :func:`apply` would refuse.
    """
    settings = Settings(
        patterns,
        class_patterns,
        dtype,
        methods_to_override,
        override_parameters,
        inputs,
        output,
    )
    selection = Selection(Targets(model, settings).rows())
    if verbose:
        logger.info("would pin %d of %s:\n%s", len(selection), type(model).__name__, selection)
    return selection


def unpin(model: nn.Module) -> int:
    """Take every pin off a model, also off a copy whose handles are elsewhere.

    It does not matter who made them and in which order. Handles of these pins do nothing later.

    Example:
        >>> import copy, torch, dtypepin
        >>> model = torch.nn.Sequential(torch.nn.LayerNorm(4))
        >>> pins = dtypepin.apply(model, "0")
        >>> twin = copy.deepcopy(model)
        >>> dtypepin.unpin(twin)
        1
        >>> len(model[0]._forward_hooks)
        1

    Args:
        model: any module.

    Returns:
        How many pins were taken off.

    Warns:
        PinWarning: as :meth:`PinHandles.remove` does.
    """
    frames.current()  # discards what a Ctrl-C may have left
    modules = list(model.modules())
    removed = 0
    changed: list[Tensor] = []
    with hooks.changing:
        for module in modules:
            for pin in reversed(list(hooks.on(module))):
                changed += handles.remove(module, pin)
                removed += 1
            for value in list(module.__dict__.values()):
                if isinstance(value, PinnedMethod):
                    value.restore()  # left by somebody's patch that was on top of a removed pin
        for module in modules:
            for view in list(reads.views(module)):  # children that have left a pinned parent
                for rule in view.rules:
                    if rule.leaving is None:  # else its call is running, and ends as it began
                        reads.uncover([module], rule)
    owners.warn_if_owned(changed)
    return removed
