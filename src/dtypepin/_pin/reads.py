"""Parameters and buffers: read as the pin's dtype inside a region, stored in it on request.

While a module is pinned, ``module._parameters`` and ``module._buffers`` are dicts of the classes
below. Reading an attribute inside a region gives a cast; everything else (iteration, optimizers,
``state_dict``) sees the originals. Swapping the entries instead would not be thread-safe and would
leave casts behind on Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dtypepin._base.dtypes import FLOATS, cast
from dtypepin._base.torch_private import in_recomputation, run_by_dynamo
from dtypepin._pin.buffers import BufferCast
from dtypepin._pin.region import Frame, Rule, current, thread


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

    def put_back(self, name: str, parameter: nn.Parameter) -> None:
        """End of a region: a parameter that was displaced in it returns."""
        if not isinstance(dict.get(self, name), nn.Parameter):
            dict.__setitem__(self, name, parameter)

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


def store(module: nn.Module, rule: Rule, known: dict[int, Stored]) -> None:
    """Store a covered module's own floating parameters and buffers in the pin's dtype.

    Args:
        module: the pinned module.
        rule: its pin.
        known: one ``Stored`` for each tensor met so far in this ``apply``, by ``id``; tied
            tensors share theirs.
    """
    for view in views(module):
        for name, value in view.items():
            if value is None or value.dtype not in FLOATS:
                continue
            stored = view.stored.get(name) or known.get(id(value)) or Stored(value.dtype)
            known[id(value)] = stored
            view.stored = {**view.stored, name: stored}
            stored.claims.append((rule, rule.dtype))
            _settle(value, stored)
    _flatten(module)


def release(module: nn.Module, rule: Rule) -> list[Tensor]:
    """Take one pin's claims back; the claim before it counts again, or the original dtype.

    Returns:
        The tensors that got another dtype, or should have and are sharded meanwhile.
    """
    changed: list[Tensor] = []
    for view in views(module):
        for name, stored in list(view.stored.items()):
            stored.claims = [claim for claim in stored.claims if claim[0] is not rule]
            value = _find(module, view, name)
            if value is not None and _settle(value, stored):
                changed.append(value)
            if not stored.claims:
                # Not before: where memory ran out, it can be tried again.
                view.stored = {key: s for key, s in view.stored.items() if key != name}
    _flatten(module)
    return changed


def _find(module: nn.Module, view: ParameterView, name: str) -> Tensor | None:
    """A stored tensor, also where ``register_parametrization`` has moved it since."""
    value: Tensor | None = dict.get(view, name)
    if value is None and parametrize.is_parametrized(module, name):
        parametrization = getattr(module, "parametrizations")[name]  # noqa: B009
        value = parametrization._parameters.get("original")
    return value


def stored_bytes(module: nn.Module) -> int:
    """What it takes in addition to store a module's tensors as pins want them, backups included."""
    total = 0
    for view in views(module):
        for name, stored in view.stored.items():
            value = dict.get(view, name)
            if value is not None:
                total += value.numel() * (value.dtype.itemsize - stored.original.itemsize)
            if stored.backup is not None:
                total += stored.backup.numel() * stored.backup.dtype.itemsize
    return total


def drifted(module: nn.Module) -> Iterator[tuple[str, Tensor, Stored]]:
    """Stored tensors of a module that somebody has cast since."""
    for view in views(module):
        for name, stored in view.stored.items():
            value = dict.get(view, name)
            if value is not None and stored.claims and value.dtype is not stored.settled:
                yield name, value, stored


def repair(value: Tensor, stored: Stored) -> None:
    """Cast a drifted tensor back; the dtype it drifted to is its unpinned one from now on."""
    with torch.inference_mode(value.is_inference()), torch.no_grad():
        value.data = _recovered(value.detach(), stored, value.dtype)  # ``model.float()``
    stored.original = stored.settled = value.dtype
    stored.backup = None
    _settle(value, stored)


@contextmanager
def kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """A cast of a whole model in this block leaves stored tensors their dtype and their digits."""
    held = [
        (view, name, stored, value.detach())
        for module in modules
        for view in views(module)
        for name, stored in view.stored.items()
        if (value := dict.get(view, name)) is not None
    ]
    yield
    for view, name, stored, before in held:
        value = dict.get(view, name)
        if value is not None and value.dtype is not stored.settled:
            repair(value, stored)
            value.data = before.to(value.device)


def _settle(tensor: Tensor, stored: Stored) -> bool:
    """Give a tensor the dtype that its last claim wants, in place; False if it had it."""
    target = stored.claims[-1][1] if stored.claims else stored.original
    was = tensor.dtype
    # Cast by somebody since, theirs stays until ``check``; in the end it still lacks the digits
    # that storing cut off.
    moved = was is not stored.settled
    if moved and not stored.claims and stored.backup is not None:
        target = was
    elif moved or was is target:
        return False
    if is_subclass(tensor):
        return True  # sharded since it was pinned: its owner needs it as it is
    # All that can fail for want of memory comes before the first change. Not in inference mode,
    # where new tensors could never be trained.
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        value = tensor.detach()
        backup = _backup(value, stored)
        new = _recovered(value, stored, target)
        if backup is None and not _survives(value, target):
            backup = value  # its storage lives on here; the tensor gets a new one
        if value.device.type == "cpu" and value.is_shared():  # type: ignore[no-untyped-call]
            new.share_memory_()  # type: ignore[no-untyped-call]
        grad = tensor.grad if tensor.is_leaf else None
        new_grad = None if grad is None else cast(grad, target)
        # ``.data`` keeps the Parameter object: optimizers, ties and hooks hold on to it.
        if grad is not None:
            tensor.grad = None  # a gradient of another dtype than its tensor is refused
        tensor.data = new
        if grad is not None:
            tensor.grad = new_grad
    stored.settled = target
    stored.backup = None if target is stored.original else backup
    return was is not target


def _recovered(value: Tensor, stored: Stored, target: torch.dtype) -> Tensor:
    """A stored tensor in another dtype: what was not trained has the bits it had before."""
    new = cast(value, target)
    backup = _backup(value, stored)
    if backup is None:
        return new
    rounded = cast(cast(backup, stored.settled), value.dtype)
    untrained = (value == rounded) | (value.isnan() & rounded.isnan())
    return torch.where(untrained, cast(backup, target), new)


def _backup(value: Tensor, stored: Stored) -> Tensor | None:
    """The values from before; None also where it was resized, or materialised by ``to_empty``."""
    backup = stored.backup
    if backup is None or backup.shape != value.shape or backup.is_meta:
        return None
    return backup.to(value.device)


def is_subclass(value: object) -> bool:
    """Whether a tensor is a wrapper around others, such as a DTensor."""
    return is_traceable_wrapper_subclass(value)  # for mypy, its TypeGuard excludes every Tensor


def _survives(value: Tensor, dtype: torch.dtype) -> bool:
    """Whether a cast to this dtype and back gives the very bits; a nan's may change."""
    wider = torch.promote_types(value.dtype, dtype) is dtype
    return wider and (value.is_meta or not value.isnan().any())


def _flatten(module: nn.Module) -> None:
    if isinstance(module, nn.RNNBase):
        module.flatten_parameters()  # cuDNN wants the weights in one piece again
