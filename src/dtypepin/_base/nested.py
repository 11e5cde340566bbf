"""The one walk through nested values: dicts, lists, tuples, named tuples, dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from dtypepin._base.dtypes import FLOATS

#: What marks a field proper of a dataclass, not a ClassVar.
_FIELD = dataclasses._FIELD  # type: ignore[attr-defined]


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every castable tensor in a nested value.

    Dicts, lists, tuples, named tuples and dataclasses are walked, subclasses of them too, and
    come back as what they were; the very same object comes back where nothing changed. A tensor
    that occurs twice is handed to the function once. Everything else passes through untouched.

    Args:
        value: anything.
        function: gets a tensor of 16, 32 or 64-bit floats, of any shape.

    Returns:
        The value, with every castable tensor replaced.
    """
    if isinstance(value, Tensor):
        return function(value) if value.dtype in FLOATS else value
    new = map_changed(value, function, {}, [])
    return value if new is None else new


def map_changed(
    value: Any,
    function: Callable[[Tensor], Tensor],
    done: dict[int, Any],
    above: list[Any],
) -> Any:
    """What ``map_tensors`` returns, or None where nothing changed.

    Dynamo cannot compare two containers by ``is``, so None has to tell.
    """
    if isinstance(value, Tensor):
        if value.dtype not in FLOATS:
            return None
        if id(value) not in done:
            done[id(value)] = function(value)
        new = done[id(value)]
        return None if new is value else new
    if isinstance(value, dict):
        items: dict[Any, Any] = value
    elif isinstance(value, (list, tuple)):
        items = dict(enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Not ``dataclasses.fields``: under dynamo its generator is an error with fullgraph=True.
        items = {
            name: getattr(value, name)
            for name, field in value.__dataclass_fields__.items()
            if getattr(field, "_field_type", None) is _FIELD and hasattr(value, name)
        }
    else:
        return None
    if not is_dynamo_compiling():
        if any(value is outer for outer in above):
            return None  # a container that holds itself
        if id(value) in done:
            return done[id(value)]  # one that is shared is walked once, and stays shared
    above.append(value)
    changed: dict[Any, Any] = {}
    for key, item in items.items():
        new = map_changed(item, function, done, above)
        if new is not None:
            changed[key] = new
    above.pop()
    rebuilt = _rebuild(value, items, changed) if changed else None
    if not is_dynamo_compiling():
        done[id(value)] = rebuilt
    return rebuilt


def _rebuild(value: Any, items: dict[Any, Any], changed: dict[Any, Any]) -> Any:
    """A copy of a container with some of its items replaced, of the same type."""
    kind = type(value)
    if kind is dict:
        return {**items, **changed}
    if isinstance(value, tuple):
        values = [changed.get(key, item) for key, item in items.items()]
        if kind is tuple:
            return tuple(values)
        if hasattr(value, "_fields"):  # a named tuple; also torch's PackedSequence
            return tuple.__new__(kind, values)
        if hasattr(value, "n_fields"):  # torch.return_types.*, a C struct sequence
            return kind(values)
        return tuple.__new__(kind, values)
    if kind is list:
        return [changed.get(key, item) for key, item in items.items()]
    fields = getattr(value, "__dataclass_fields__", None)
    if isinstance(value, OrderedDict) and fields is not None and not is_dynamo_compiling():
        # transformers' outputs: copying them runs generators, which a compiled model's hooks,
        # called outside of its graph, may not with fullgraph=True.
        new = OrderedDict.__new__(kind)
        new.__dict__.update(vars(value))
        changed = {**items, **changed}
    else:
        # It keeps default factories, extra attributes and fields that __init__ does not take.
        new = copy.copy(value)
    for key, item in changed.items():
        if isinstance(value, (dict, list)):
            new[key] = item
        else:
            object.__setattr__(new, key, item)  # also a frozen dataclass
    return new
