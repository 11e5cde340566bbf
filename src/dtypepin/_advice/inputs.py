"""What ``suggest`` is given: checked, taken apart, and copied for one run."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dtypepin._base.dtypes import FLOATS, short
from dtypepin._base.errors import PinError
from dtypepin._base.nested import map_tensors
from dtypepin._base.selection import named
from dtypepin._pin import hooks

Batch = tuple[tuple[Any, ...], dict[str, Any]]


def checked(
    model: nn.Module, inputs: Any, holdout: Any
) -> tuple[nn.Module, list[Batch], list[Batch]]:
    """The model without wrappers, and the batches; refuses what could not be compared."""
    batches = _batches(inputs, "inputs")
    held = [] if holdout is None else _batches(holdout, "holdout")
    everything = named(model)
    _check_signature(everything[0].module, batches, "inputs")
    _check_signature(everything[0].module, held, "holdout")
    for found in everything:
        for name, value in found.module.named_parameters(prefix=found.names[0], recurse=False):
            if is_lazy(value):
                raise PinError(f"model: {name!r} is not initialised yet; run one forward first")
            if value.dtype in FLOATS and value.dtype is not torch.float32:
                raise PinError(
                    f"model: got {name!r} in {short(value.dtype)}, expected a float32 model to "
                    "compare with; model_dtype= is for one that will be cast as a whole"
                )
        if any(True for _ in hooks.on(found.module)):
            raise PinError(
                f"model: got {found.names[0]!r} pinned already, expected no pins; unpin(model) "
                "takes them off"
            )
    return everything[0].module, batches, held


def _check_signature(model: nn.Module, batches: list[Batch], what: str) -> None:
    if model._forward_pre_hooks or type(model).__call__ is not nn.Module.__call__:
        return  # they may change the arguments
    try:
        # Not that of what a decorator wraps, which may be handed more or less.
        signature = inspect.signature(model.forward, follow_wrapped=False)
    except (TypeError, ValueError):
        return  # it has none that Python knows
    for args, kwargs in batches:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise PinError(
                f"{what}: got a batch that forward of {type(model).__name__} does not take "
                f"({error}), expected its arguments alone, in a tuple or a dict, no labels; "
                "a named tuple that is one argument goes into a tuple: (batch,)"
            ) from None


def _batches(inputs: Any, what: str) -> list[Batch]:
    def batch(value: Any) -> Batch:
        if isinstance(value, dict) or hasattr(value, "keys"):
            return (), dict(value)
        if isinstance(value, tuple):
            return value, {}
        return (value,), {}

    if isinstance(inputs, (Tensor, tuple, dict)) or hasattr(inputs, "keys"):
        return [batch(inputs)]
    if not isinstance(inputs, Iterable) or isinstance(inputs, (str, bytes)):
        raise PinError(
            f"{what}: got {type(inputs).__name__}, expected a tensor, a tuple of arguments, a dict "
            "of keyword arguments, or an iterable of these"
        )
    values = list(inputs)
    if not values:
        raise PinError(f"{what}: got no batch, expected one or more")
    if any(isinstance(value, list) for value in values):
        raise PinError(
            f"{what}: got a list as one batch, expected a tensor, a tuple of arguments or a dict "
            "of keyword arguments; of a loader that gives inputs and labels: "
            "[x for x, _ in loader]; for a forward that takes a list: [(the_list,)]"
        )
    return [batch(value) for value in values]


def check_numbers(
    tolerance: float, absolute: float | None, probes: int | None, max_runs: int, seed: int
) -> None:
    def check(name: str, value: Any, kind: type, good: Callable[[Any], bool], what: str) -> None:
        right = isinstance(value, (int, kind)) and not isinstance(value, bool)
        if not right or not good(value):
            raise PinError(f"{name}: got {value!r}, expected {what}")

    if absolute is None:
        between = "a number between 0 and 1"
        check("tolerance", tolerance, float, lambda value: 0 < value < 1, between)
    else:
        more = "a number above 0"
        check("absolute_tolerance", absolute, float, lambda v: 0 < v < math.inf, more)
    if probes is not None:
        check("probes", probes, int, lambda value: value > 0, "a number above 0")
    check("max_runs", max_runs, int, lambda value: value > 0, "a number above 0")
    check("seed", seed, int, lambda value: True, "an integer")


def looks_like_noise(tensor: Tensor) -> bool:
    """Whether a tensor has the moments of ``torch.randn`` and neighbours that know nothing."""
    values = tensor.detach().double().flatten()
    if values.numel() < 256:
        return False
    mean, std = values.mean(), values.std()
    if abs(float(mean)) > 0.1 or abs(float(std) - 1) > 0.1:
        return False
    normal = (values - mean) / std
    together = float((normal[1:] * normal[:-1]).mean())
    return abs(float((normal**4).mean()) - 3) < 0.5 and abs(together) < 0.1


def fresh(batch: Batch) -> Batch:
    """A batch of its own for one forward: modules in place must not write into the user's."""
    new: Batch = copied(batch, lambda tensor: tensor.detach().clone())
    return new


def copied(values: Any, copy_float: Callable[[Tensor], Tensor]) -> Any:
    """A copy in which all that a forward might change, caches and indices too, is its own."""
    memo: dict[int, Any] = {}

    def look(tensor: Tensor) -> Tensor:
        memo[id(tensor)] = copy_float(tensor)
        return tensor

    map_tensors(values, look)
    return copy.deepcopy(values, memo)


def outputs(value: Any, above: tuple[Any, ...] = ()) -> list[Tensor]:
    """The floating tensors in a model's output, in order; complex ones as pairs of floats."""
    if isinstance(value, Tensor):
        value = torch.view_as_real(value) if value.is_complex() else value
        return [value] if value.dtype in FLOATS else []
    if isinstance(value, dict):
        items = list(value.values())
    elif isinstance(value, (list, tuple)):
        items = list(value)
    elif dataclasses.is_dataclass(value):
        items = [getattr(value, each.name, None) for each in dataclasses.fields(value)]
    else:
        return []
    if any(value is outer for outer in above):
        return []  # a container that holds itself
    return [tensor for item in items for tensor in outputs(item, (*above, value))]


def as_float32(value: Any) -> list[Tensor]:
    """Copies of a model's outputs: it may use the same memory for the next ones."""
    return [tensor.detach().to(torch.float32, copy=True) for tensor in outputs(value)]


def leaves(value: Any) -> list[Tensor]:
    """The floating tensors in a nested value, in order, each once."""
    found: list[Tensor] = []

    def look(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, look)
    return found
