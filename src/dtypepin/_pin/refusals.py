"""What can not be pinned, found out before anything is changed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dtypepin._base.dtypes import short
from dtypepin._base.errors import PinError, warn
from dtypepin._base.selection import Named, parts
from dtypepin._base.torch_private import FAST_PATH_SEES_HOOKS
from dtypepin._pin.reads import is_subclass, own_floats


def check(
    model: nn.Module,
    everything: list[Named],
    chosen: list[Named],
    dtype: torch.dtype,
    override: bool,
) -> None:
    """Refuse what would be wrong, silently or later.

    Args:
        model: where the chosen modules were found.
        everything: all its modules.
        chosen: the modules to be pinned.
        dtype: the dtype they are pinned to.
        override: whether their own parameters are to be stored in it.

    Raises:
        PinError: names the module, the reason and the way out.
    """
    ids = {id(found.module) for found in chosen}
    names = {id(found.module): found.names[0] for found in everything}
    flat = _inside(model, "FullyShardedDataParallel")
    replicated = _inside(model, "DataParallel")
    seen: set[int] = set()
    for found in chosen:
        for part in parts(found.module):
            if id(part) in seen:
                continue
            seen.add(id(part))
            reason = _reason(
                part,
                dtype,
                chosen=id(part) in ids,
                override=override,
                flat=id(part) in flat,
                replicated=id(part) in replicated,
            )
            if reason:
                name = names.get(id(part), found.names[0])
                what = f"module {name!r}" if name else "the root module"
                raise PinError(f"{what} ({type(part).__name__}) {reason}")
    if override:
        _check_storing(model, chosen, everything, dtype)
    if not FAST_PATH_SEES_HOOKS:
        _warn_of_fast_path(everything, ids)


def _warn_of_fast_path(everything: list[Named], chosen: set[int]) -> None:
    """Old torch runs nn.TransformerEncoderLayer in one fused op, in eval and without gradients."""
    for layer in everything:
        if isinstance(layer.module, nn.TransformerEncoderLayer) and id(layer.module) not in chosen:
            inside = [part for part in everything if id(part.module) in chosen]
            below = {id(part) for part in layer.module.modules()}
            names = [part.names[0] for part in inside if id(part.module) in below]
            if names:
                warn(
                    f"pinned inside the nn.TransformerEncoderLayer {layer.names[0]!r}: "
                    f"{', '.join(names)}. On torch {torch.__version__} its fast path, in eval and "
                    "without gradients, calls none of them; switch it off with "
                    "torch.backends.mha.set_fastpath_enabled(False), or pin the whole layer"
                )
                return


def _reason(
    part: nn.Module,
    dtype: torch.dtype,
    *,
    chosen: bool,
    override: bool,
    flat: bool,
    replicated: bool,
) -> str | None:
    """Why one module in a pinned region cannot be there, and what to do instead."""
    floats = [value for _, value in own_floats(part)]
    differs = any(value.dtype is not dtype for value in floats)
    if isinstance(part, torch.jit.ScriptModule) and (chosen or differs):
        return (
            "is a ScriptModule, which hooks cannot reach inside; "
            "pin the Python module before torch.jit.script or torch.jit.trace"
        )
    if flat:
        return (
            "is wrapped in FullyShardedDataParallel (FSDP1), which keeps its parameters as flat "
            "views; shard with torch.distributed.fsdp.fully_shard"
        )
    if not differs:
        return None
    if override and chosen:
        if any(is_lazy(value) for value in floats):
            return (
                "has parameters that are not initialised yet; "
                "run one forward first, or leave override_parameters off"
            )
        return None
    if isinstance(part, nn.RNNBase):
        return (
            f"keeps its own list of its weights, which cannot be cast to {short(dtype)} for the "
            "call; pin that module itself with override_parameters=True"
        )
    if getattr(part, "max_norm", None) is not None and isinstance(
        part, (nn.Embedding, nn.EmbeddingBag)
    ):
        return (
            "has max_norm, which rescales its stored weight in place; that would be lost in a cast "
            "for the call. Pin that module itself with override_parameters=True"
        )
    if getattr(part, "sparse", False) and isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
        return (
            "has sparse=True, and autograd cannot cast its sparse gradient back; pin that module "
            "itself with override_parameters=True"
        )
    if _computes_weight_in_a_hook(part):
        return (
            f"computes its weight in a hook outside the pinned region, not in {short(dtype)}; "
            "use torch.nn.utils.parametrizations, make pruning permanent, or pin that module "
            "itself with override_parameters=True"
        )
    if replicated:
        return (
            "is inside a DataParallel, whose replicas hold their weights as plain attributes that "
            "cannot be cast for the call; use override_parameters=True, or DistributedDataParallel"
        )
    return None


def _check_storing(
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
                owner = _owner(value)
                if owner:
                    raise PinError(
                        f"override_parameters=True: {_dotted(found.names[0], name)} {owner}; "
                        "pin before wrapping or sharding the model, or leave "
                        "override_parameters off (the parameter is cast for the call)"
                    )
            start, end = _memory(value)
            spans.append(_Span(start, end, id(value), selected, _dotted(found.names[0], name)))
    if not to_store:
        return
    _check_memory(spans, set(to_store))
    _check_ddp(to_store)
    fsdp = [m for m in model.modules() if any(k.__name__ == "FSDPModule" for k in type(m).__mro__)]
    for module in fsdp:
        for value in module.parameters():
            if id(value) in to_store:
                raise PinError(
                    f"override_parameters=True: {_dotted(*to_store[id(value)])} is already managed "
                    "by fully_shard, which needs one dtype in a group; pin before fully_shard, or "
                    "leave override_parameters off (the parameter is cast for the call)"
                )


def _check_ddp(to_store: dict[int, tuple[str, str]]) -> None:
    """A parameter's dtype is laid down in DDP's gradient buckets when the model is wrapped."""
    for value in _in_ddp():
        if id(value) in to_store:
            raise PinError(
                f"override_parameters=True: {_dotted(*to_store[id(value)])} is already owned by "
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
    if ids and any(id(value) in ids for value in _in_ddp()):
        warn(
            "parameters got their old dtype back while DistributedDataParallel owns them, whose "
            "gradient buckets are laid out in the pin's dtype; wrap the model anew before it is "
            "trained further"
        )


def owned(values: list[Tensor]) -> set[int]:
    """The ids of those that DDP or ``fully_shard`` has laid out in the dtype they have now."""
    found = {id(value) for value in values if _owner(value) is not None}
    return found | {id(value) for value in (_in_ddp() if values else ())}


def _in_ddp() -> Iterator[Tensor]:
    """All parameters that DDP reduces gradients of, in any model of this process."""
    ddp = getattr(sys.modules.get("torch.nn.parallel.distributed"), "DistributedDataParallel", None)
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if ddp is None or not distributed:
        return
    # A trainer may hand out ``ddp.module``, from where the wrapper cannot be seen. Not isinstance:
    # it asks objects for their ``__class__``, and a dead weak proxy raises.
    for wrapper in [item for item in gc.get_objects() if issubclass(type(item), ddp)]:
        yield from (value for value in wrapper.parameters() if value.requires_grad)


def _owner(value: Tensor) -> str | None:
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


def _computes_weight_in_a_hook(module: nn.Module) -> bool:
    """Whether weight_norm or spectral_norm, the deprecated ones, or pruning stand on a module."""
    return any(
        kind.__module__.startswith("torch.nn.utils.")
        for hook in module._forward_pre_hooks.values()
        for kind in type(hook).__mro__
    )


def _inside(model: nn.Module, wrapper: str) -> set[int]:
    """The ids of all modules inside a wrapper of this class name."""
    kinds = {
        kind
        for kind in {type(module) for module in model.modules()}
        if kind.__module__.startswith("torch.")
        and any(base.__name__ == wrapper for base in kind.__mro__)
    }
    return {
        id(part)
        for module in (model.modules() if kinds else ())
        if type(module) in kinds
        for part in module.modules()
    }


def _dotted(module: str, name: str) -> str:
    return repr(f"{module}.{name}" if module else name)
