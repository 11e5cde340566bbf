"""Parameters and buffers that are stored in a pin's dtype, and the way back to their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dtypepin._base.dtypes import FLOATS, cast
from dtypepin._base.torch_private import is_subclass
from dtypepin._pin.frames import Rule
from dtypepin._pin.reads import ParameterView, Stored, views


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


def _survives(value: Tensor, dtype: torch.dtype) -> bool:
    """Whether a cast to this dtype and back gives the very bits; a nan's may change."""
    wider = torch.promote_types(value.dtype, dtype) is dtype
    return wider and (value.is_meta or not value.isnan().any())


def _flatten(module: nn.Module) -> None:
    if isinstance(module, nn.RNNBase):
        module.flatten_parameters()  # cuDNN wants the weights in one piece again
