"""What a call was given: which inputs are cast, and what they say of its dtype and device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dtypepin._base.dtypes import FLOATS, cast, short
from dtypepin._base.nested import map_changed, map_tensors
from dtypepin._pin.frames import Rule

Args = tuple[Any, ...]

Kwargs = dict[str, Any]


def named_dtype(args: Args, kwargs: Kwargs) -> torch.dtype | None:
    """The first floating dtype among the arguments themselves.

    ``norm(x, hidden_dtype=x.dtype)`` says what to compute in: diffusers' adaptive norms do.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.dtype) and value in FLOATS:
            return value
    return None


def name_dtype(args: Args, kwargs: Kwargs, dtype: torch.dtype) -> tuple[Args, Kwargs]:
    """The arguments with the pin's dtype where one names a floating dtype."""
    return (
        tuple([dtype if _is_float(value) else value for value in args]),
        {key: dtype if _is_float(value) else value for key, value in kwargs.items()},
    )


def _is_float(value: object) -> bool:
    return isinstance(value, torch.dtype) and value in FLOATS


def first(args: Args, kwargs: Kwargs) -> Tensor | None:
    """The first argument that is a floating tensor, positional before keyword."""
    for value in args:
        if isinstance(value, Tensor) and value.dtype in FLOATS:
            return value
    for value in kwargs.values():
        if isinstance(value, Tensor) and value.dtype in FLOATS:
            return value
    return None


def replace(args: Args, kwargs: Kwargs, old: Tensor, new: Tensor) -> tuple[Args, Kwargs]:
    """Replace one tensor wherever the very same one is an argument."""
    if kwargs:
        kwargs = {key: new if value is old else value for key, value in kwargs.items()}
    elif len(args) == 1:
        return (new,), kwargs
    return tuple([new if value is old else value for value in args]), kwargs


def cast_all(
    args: Args, kwargs: Kwargs, dtype: torch.dtype
) -> tuple[Tensor | None, tuple[Args, Kwargs] | None]:
    """The first floating tensor anywhere in the arguments, and the arguments all cast."""
    seen: list[Tensor] = []

    def cast_one(tensor: Tensor) -> Tensor:
        if not seen:
            seen.append(tensor)
        return cast(tensor, dtype)

    new = map_changed((args, kwargs), cast_one, {}, [])
    return (seen[0] if seen else None), new


def parameter_dtype(module: torch.nn.Module) -> torch.dtype | None:
    """The dtype of the module's first floating parameter, or buffer, before it was pinned."""
    for holder in (module, *module.modules()):
        for views in (holder._parameters, holder._buffers):
            unpinned = getattr(views, "unpinned_dtype", None)
            for name, value in views.items():
                if value is not None and value.dtype in FLOATS:
                    found: torch.dtype = value.dtype if unpinned is None else unpinned(name)
                    return found
    return None


def device(args: Args, kwargs: Kwargs, module: torch.nn.Module) -> str | None:
    """The device type of the first tensor argument, else of the first parameter or buffer.

    Where there is none at all, a device on which autocast is on.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.device.type
    kinds: list[str] = []

    def look(tensor: Tensor) -> Tensor:
        kinds.append(tensor.device.type)
        return tensor

    map_tensors((args, kwargs), look)  # a dict of tensors, as losses and matchers get
    if kinds:
        return kinds[0]
    for holder in module.modules():
        for values in (holder._parameters, holder._buffers):
            for value in values.values():
                if value is not None and value.device.type != "meta":
                    return value.device.type
                if value is not None:
                    kinds.append("meta")
    if kinds:
        return "meta"
    for kind in ("cuda", "xpu", "cpu"):
        if torch.is_autocast_enabled(kind):
            return kind
    return None


def not_cast(rule: Rule, args: Args, kwargs: Kwargs) -> str:
    """What to say of inputs that came into a region of this rule in another dtype, if any did."""
    left: dict[str, None] = {}
    if rule.inputs == "all":
        return ""

    def look(tensor: Tensor) -> Tensor:
        if tensor.dtype is not rule.dtype:
            left[short(tensor.dtype)] = None
        return tensor

    map_tensors((args, kwargs), look)
    if not left:
        return ""
    return (
        f'; other floating inputs were left in {", ".join(left)}: inputs="all" would cast them too'
    )
