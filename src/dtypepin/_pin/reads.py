"""How parameters and buffers read in a region.

While a module is pinned, ``module._parameters`` and ``module._buffers`` are dicts of the classes
below. Reading an attribute inside a region gives a cast; everything else (iteration, optimizers,
``state_dict``) sees the originals. Swapping the entries instead would not be thread-safe and would
leave casts behind on Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from dtypepin._base.dtypes import FLOATS, cast
from dtypepin._base.torch_private import (
    in_functorch,
    in_recomputation,
    is_exporting,
    is_subclass,
    is_tracing,
    run_by_dynamo,
)
from dtypepin._pin.casts import Cast, TracedCast, has_graph, version
from dtypepin._pin.frames import Frame, Rule, current, thread
from dtypepin._pin.standins import BufferRead, ParameterRead, Read


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

    #: What its entries are to whoever reads them in a region.
    kind: type[Read] = ParameterRead

    def __getitem__(self, name: str) -> Any:
        value = dict.__getitem__(self, name)
        frames = thread.frames
        if frames and value is not None:
            dtype = frames[-1].dtype
            if value.dtype is not dtype and value.dtype in FLOATS:
                if is_dynamo_compiling():
                    return self._traced(name, value, frames[-1])
                reader = sys._getframe(1)
                direct = reader.f_code is not _GETATTR
                if _computes(reader if direct else reader.f_back, direct):
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
        """The one cast of this tensor in these regions."""
        if not _is_known(value):
            return value
        home = frame.home
        if home.casts is not None:
            known = home.casts.get(id(value))
            if known is not None:
                read = known.read
                if read is not None and (known.version == version(value) or self._is_still(known)):
                    return read
        dtype = self.unpinned_dtype(name) if frame.dtype is None else frame.dtype
        if value.dtype is dtype:
            return value
        if _is_traced(value):
            return self._traced(name, value, frame)
        made = Cast(value, dtype, self.kind)
        if home.casts is None:
            home.casts = {}
        home.casts[id(value)] = made
        read, made.made = made.made, None
        assert read is not None
        return read

    def _is_still(self, known: Cast) -> bool:
        """Somebody wrote to the tensor itself: whether the cast can be brought up to date."""
        read = known.read
        if read is None or has_graph(read):
            return False  # it may be saved for backward
        known.write_back(read)
        known.refresh()
        return True

    def _traced(self, name: str, value: Tensor, frame: Frame) -> Tensor:
        """A cast for a graph."""
        return cast(value, self.unpinned_dtype(name) if frame.dtype is None else frame.dtype)

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(value, Read) and "cast" in value.__dict__:
            value = value.__dict__["cast"].original  # what was read is put back
        elif thread.frames:
            self._replace(name, value)
        dict.__setitem__(self, name, value)

    def _replace(self, name: str, value: Any) -> None:
        """Somebody puts another tensor in this one's place in a region."""
        frame = _frame()
        old = dict.get(self, name)
        if frame is None or value is None or old is None or value is old:
            return
        if isinstance(value, nn.Parameter) and (
            is_dynamo_compiling() or not _computes(sys._getframe(2), False)
        ):
            return  # sharding, offloading: it is theirs
        home = frame.home
        if home.displaced is None:
            home.displaced = []
        # What was there first counts: a master, and later the placeholder again.
        if not any(values is self and name == known for values, known, _ in home.displaced):
            home.displaced.append((self, name, old))

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

    kind = BufferRead

    def _recomputed(self, value: Any) -> Any:
        return value if value is None else super()._recomputed(value)

    def _traced(self, name: str, value: Tensor, frame: Frame) -> Tensor:
        # One cast for all regions of this dtype, so that what is written is seen by the next read.
        # A list, not a dict by ``id``: dynamo would compile anew for each new view.
        for outer in reversed(thread.frames):
            if outer.dtype is not frame.dtype:
                break
            for known in outer.traced or ():
                if known.original is value:
                    return known.read
        read = super()._traced(name, value, frame)
        if read is not value:
            if not is_dynamo_compiling():
                if run_by_dynamo():
                    return read  # a change of the real frame would break the guards in the making
                read.read_from = value  # type: ignore[attr-defined]
            if frame.traced is None:
                frame.traced = []
            frame.traced.append(TracedCast(value, read))
        return read

    def __setitem__(self, name: str, value: Any) -> None:
        original = getattr(value, "read_from", None)
        # The cast that was read is put back, as ``functional_call`` does.
        super().__setitem__(name, value if original is None else original)


_GETATTR = nn.Module.__getattr__.__code__
#: Kinds of tensors whose dtype is known to be what their bits mean.
_KNOWN = (Tensor, nn.Parameter, getattr(nn, "Buffer", Tensor))
#: Who manages parameters, and is there for the parameter itself and not to compute with it.
_MANAGERS = ("torch.distributed.", "accelerate.", "deepspeed.")
#: Torch itself looks into ``_parameters`` for the parameter, as ``functional_call`` does.
_LOOKING = ("torch.", *_MANAGERS)


def _is_known(value: Tensor) -> bool:
    """Whether the dtype of a tensor is what its bits mean, as far as its class tells."""
    kind = type(value)
    # Export puts fake tensors in the place of parameters.
    return kind in _KNOWN or is_subclass(value) or kind.__module__.startswith("torch._subclasses")


def _computes(reader: FrameType | None, direct: bool) -> bool:
    """Whether who reads a parameter in a region computes with it."""
    if reader is None:
        return True
    name = reader.f_globals.get("__name__") or ""
    return not name.startswith(_LOOKING if direct else _MANAGERS)


def _is_traced(value: Tensor) -> bool:
    """Whether a graph is being made, or there are no numbers to compare."""
    return (
        is_tracing()
        or is_exporting()
        or run_by_dynamo()
        or in_functorch()
        or not (type(value) in _KNOWN or type(value).__name__ == "DTensor")
    )


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
