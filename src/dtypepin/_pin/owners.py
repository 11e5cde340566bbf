"""Who else holds a tensor, so that its dtype may not change: DDP, ``fully_shard``, views, ties."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dtypepin._base.errors import PinError, warn
from dtypepin._base.selection import Named
from dtypepin._base.torch_private import is_subclass
from dtypepin._pin.reads import own_floats


def check_storing(
    model: nn.Module, chosen: list[Named], everything: list[Named], dtype: torch.dtype
) -> None:
    """Refuse to change the dtype of a tensor that somebody else counts on."""
    ids = {id(found.module) for found in chosen}
    to_store: dict[int, tuple[str, str]] = {}
    spans: list[_Span] = []
    for found in everything:
        selected = id(found.module) in ids
        for name, value in own_floats(found.module):
            if selected and value.dtype is not dtype:
                to_store[id(value)] = (found.names[0], name)
                held = owner(value)
                if held:
                    raise PinError(
                        f"override_parameters=True: {dotted(found.names[0], name)} {held}; "
                        "pin before wrapping or sharding the model, or leave "
                        "override_parameters off (the parameter is cast for the call)"
                    )
            start, end = _memory(value)
            spans.append(_Span(start, end, id(value), selected, dotted(found.names[0], name)))
    if not to_store:
        return
    _check_memory(spans, set(to_store))
    _check_ddp(to_store)
    fsdp = [m for m in model.modules() if any(k.__name__ == "FSDPModule" for k in type(m).__mro__)]
    for module in fsdp:
        for value in module.parameters():
            if id(value) in to_store:
                raise PinError(
                    f"override_parameters=True: {dotted(*to_store[id(value)])} is already managed "
                    "by fully_shard, which needs one dtype in a group; pin before fully_shard, or "
                    "leave override_parameters off (the parameter is cast for the call)"
                )


def _check_ddp(to_store: dict[int, tuple[str, str]]) -> None:
    """A parameter's dtype is laid down in DDP's gradient buckets when the model is wrapped."""
    for value in in_ddp():
        if id(value) in to_store:
            raise PinError(
                f"override_parameters=True: {dotted(*to_store[id(value)])} is already owned by "
                "DistributedDataParallel, whose gradient buckets are laid out in its present "
                "dtype; pin before wrapping the model, or leave override_parameters off (the "
                "parameter is cast for the call)"
            )


def warn_if_owned(changed: list[Tensor]) -> None:
    """Say what undo means for tensors that DDP or FSDP2 took over while they were stored."""
    if any(is_subclass(value) for value in changed):
        warn(
            "parameters that were sharded while they were stored in the pin's dtype stay in it: "
            "fully_shard needs them as they are. Remove the pins before sharding, or shard anew"
        )
    ids = {id(value) for value in changed}
    if ids and any(id(value) in ids for value in in_ddp()):
        warn(
            "parameters got their old dtype back while DistributedDataParallel owns them, whose "
            "gradient buckets are laid out in the pin's dtype; wrap the model anew before it is "
            "trained further"
        )


def owned(values: list[Tensor]) -> set[int]:
    """The ids of those that DDP or ``fully_shard`` has laid out in the dtype they have now."""
    found = {id(value) for value in values if owner(value) is not None}
    return found | {id(value) for value in (in_ddp() if values else ())}


def in_ddp() -> Iterator[Tensor]:
    """All parameters that DDP reduces gradients of, in any model of this process."""
    ddp = getattr(sys.modules.get("torch.nn.parallel.distributed"), "DistributedDataParallel", None)
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if ddp is None or not distributed:
        return
    # A trainer may hand out ``ddp.module``, from where the wrapper cannot be seen. Not isinstance:
    # it asks objects for their ``__class__``, and a dead weak proxy raises.
    for wrapper in [item for item in gc.get_objects() if issubclass(type(item), ddp)]:
        yield from (value for value in wrapper.parameters() if value.requires_grad)


def owner(value: Tensor) -> str | None:
    if type(value).__name__ == "DTensor" or type(value.data).__name__ == "DTensor":
        return "is a DTensor, already sharded"
    if is_subclass(value):
        return f"is a {type(value).__name__}, whose dtype cannot be changed in place"
    return None


class _Span(NamedTuple):
    """The memory that a parameter or buffer lies in."""

    start: int
    end: int
    tensor: int
    selected: bool
    name: str


def _memory(value: Tensor) -> tuple[int, int]:
    """From which address to which a tensor lies, in bytes; its ``id`` where it has no memory."""
    if is_lazy(value) or value.device.type == "meta" or is_subclass(value) or not value.numel():
        return -id(value), -id(value) + 1
    steps = sum(
        (size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)
    )
    return value.data_ptr(), value.data_ptr() + (steps + 1) * value.element_size()


def _check_memory(spans: list[_Span], to_store: set[int]) -> None:
    """Refuse to take a tensor out of memory that it shares with another one."""
    last: _Span | None = None
    for span in sorted(spans):
        if last is not None and span.start < last.end:
            same = span.tensor == last.tensor
            stored, other = (span, last) if span.tensor in to_store else (last, span)
            if same:
                stored, other = (span, last) if span.selected else (last, span)
            if stored.tensor in to_store and not (same and other.selected):
                raise PinError(
                    f"override_parameters=True: {stored.name} is the same memory as {other.name}, "
                    + ("which is not selected and would change dtype too" if same else "as a view")
                    + "; leave override_parameters off (the tie is kept, the parameter is cast for "
                    + ("the call), or select both modules" if same else "the call)")
                )
        if last is None or span.end > last.end:
            last = span


def dotted(module: str, name: str) -> str:
    return repr(f"{module}.{name}" if module else name)
