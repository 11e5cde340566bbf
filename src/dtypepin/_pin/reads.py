"""How parameters and buffers read in a region.

While a module is pinned, ``module._parameters`` and ``module._buffers`` are dicts of the classes
below. Reading an attribute inside a region gives a cast; everything else (iteration, optimizers,
``state_dict``) sees the originals. Swapping the entries instead would not be thread-safe and would
leave casts behind on Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from dtypepin._base.dtypes import FLOATS, cast
from dtypepin._base.torch_private import in_recomputation, run_by_dynamo
from dtypepin._pin.buffers import BufferCast
from dtypepin._pin.frames import Frame, Rule, current, thread


class Stored:
    """One tensor that pins store in their dtype, and the way back.

    Attributes:
        original: the dtype it has without pins.
        settled: the dtype we last gave it; another one means that somebody cast it since.
        backup: the tensor before it was first stored in a dtype that loses digits, if it was.
        claims: who wants it stored in what; the last one counts.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.original = dtype
        self.settled = dtype
        self.backup: Tensor | None = None
        self.claims: list[tuple[Rule, torch.dtype]] = []


class ParameterView(dict[str, Any]):
    """``module._parameters`` of a module in a pinned region.

    Attributes:
        rules: the pins that this view is here for.
        inherited: those of them that pin a parent of this module.
        stored: the entries that pins store in their dtype.
        plain: the dict that was here before, and comes back.
    """

    rules: tuple[Rule, ...] = ()
    inherited: tuple[Rule, ...] = ()
    stored: Mapping[str, Stored] = {}  # never written to, always replaced
    plain: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        value = dict.__getitem__(self, name)
        frames = thread.frames
        if frames and value is not None:
            dtype = frames[-1].dtype
            if value.dtype is not dtype and value.dtype in FLOATS:
                if is_dynamo_compiling():
                    return self._read(name, value, frames[-1])
                # Only ``module.weight`` is a read. Whoever looks into ``_parameters`` itself, as
                # offloading and ``functional_call`` do, is there for the Parameter.
                if sys._getframe(1).f_code.co_name == "__getattr__":
                    frame = current()
                    if frame is not None:
                        return self._read(name, value, frame)
        elif self.inherited and not is_dynamo_compiling() and in_recomputation():
            return self._recomputed(value)
        return value

    def _recomputed(self, value: Any) -> Any:
        # A pinned forward that calls ``checkpoint`` itself, as transformers' layers do: what it
        # computes again in backward runs outside its region, and has to read the same dtype.
        for rule in reversed(self.inherited):
            if rule.active and value is not None and value.dtype in FLOATS:
                return cast(value, rule.dtype)
        return value

    def _read(self, name: str, value: Tensor, frame: Frame) -> Tensor:
        if isinstance(value, (UninitializedParameter, UninitializedBuffer)):
            return value  # LazyLinear's own hook materialises it first
        return cast(value, self.unpinned_dtype(name) if frame.dtype is None else frame.dtype)

    def __setitem__(self, name: str, value: Any) -> None:
        frame = _frame()
        old = dict.get(self, name)
        if frame is not None and isinstance(old, nn.Parameter):
            if not isinstance(value, nn.Parameter):
                # ``functional_call`` in a pinned forward: it will put back the cast that it read.
                if frame.displaced is None:
                    frame.displaced = []
                frame.displaced.append((self, name, old))
            elif value.dtype is frame.dtype and value is not old and old.dtype in FLOATS:
                # Made from what was read here, as offloading does: it keeps its own dtype.
                value.data = cast(value.data, old.dtype)
        dict.__setitem__(self, name, value)

    def unpinned_dtype(self, name: str) -> torch.dtype:
        """The dtype that an entry has without pins."""
        dtype: torch.dtype = dict.__getitem__(self, name).dtype
        stored = self.stored.get(name)
        return stored.original if stored and dtype is stored.settled else dtype


def _frame() -> Frame | None:
    """The innermost region, if there is any."""
    frames = thread.frames
    if not frames:
        return None
    return frames[-1] if is_dynamo_compiling() else current()


class BufferView(ParameterView):
    """``module._buffers`` of a module in a pinned region: what is written to casts arrives."""

    def _read(self, name: str, value: Tensor, frame: Frame) -> Tensor:
        # One cast for all regions of this dtype, so that what is written is seen by the next read.
        # A list, not a dict by ``id``: dynamo would compile anew for each new view.
        for outer in reversed(thread.frames):
            if outer.dtype is not frame.dtype:
                break
            for known in outer.buffers or ():
                if known.original is value:
                    return known.read
        read = super()._read(name, value, frame)
        if read is not value:
            if not is_dynamo_compiling():
                if run_by_dynamo():
                    return read  # a change of the real frame would break the guards in the making
                read.read_from = value  # type: ignore[attr-defined]
            if frame.buffers is None:
                frame.buffers = []
            frame.buffers.append(BufferCast(value, read))
        return read

    def __setitem__(self, name: str, value: Any) -> None:
        original = getattr(value, "read_from", None)
        if original is not None:
            value = original  # the cast that was read is put back, as ``functional_call`` does
        elif isinstance(value, Tensor) and value.dtype in FLOATS and _frame() is not None:
            old = dict.get(self, name)
            if old is not None and old.dtype in FLOATS:
                value = cast(value, old.dtype)  # ``self.mean = new``: it keeps its own dtype
        dict.__setitem__(self, name, value)


def put_back(values: dict[str, Any], name: str, parameter: nn.Parameter) -> None:
    """End of a region: a parameter that was displaced in it returns."""
    if not isinstance(dict.get(values, name), nn.Parameter):
        dict.__setitem__(values, name, parameter)


def views(module: nn.Module) -> Iterator[ParameterView]:
    """The views that stand on a module itself."""
    for values in (module._parameters, module._buffers):
        if isinstance(values, ParameterView):
            yield values


def own_floats(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The module's own parameters and buffers that can be cast, without its children's."""
    for values in (module._parameters, module._buffers):
        for name, value in values.items():
            if value is not None and value.dtype in FLOATS:
                yield name, value


def cover(modules: Iterable[nn.Module], rule: Rule, pinned: nn.Module) -> None:
    """Put views on modules in the region of one pinned module."""
    for module in modules:
        for attribute, kind in (("_parameters", ParameterView), ("_buffers", BufferView)):
            values = module.__dict__[attribute]
            if not isinstance(values, ParameterView):
                if not isinstance(values, dict) or not values:
                    continue
                view = kind(values)
                view.plain = values
                module.__dict__[attribute] = values = view
            values.rules = (*values.rules, rule)
            if module is not pinned:
                values.inherited = (*values.inherited, rule)


def uncover(modules: Iterable[nn.Module], rule: Rule) -> None:
    """Take one pin's views off; the last pin of a view gives the plain dict back."""
    for module in modules:
        for attribute in ("_parameters", "_buffers"):
            view = module.__dict__[attribute]
            if isinstance(view, ParameterView) and any(rule is here for here in view.rules):
                view.rules = tuple(here for here in view.rules if here is not rule)
                view.inherited = tuple(here for here in view.inherited if here is not rule)
                if not view.rules:
                    view.plain.clear()
                    view.plain.update(view.items())
                    module.__dict__[attribute] = view.plain
