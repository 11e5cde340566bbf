"""What can not be pinned, found out before anything is changed."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dtypepin._base.dtypes import short
from dtypepin._base.errors import PinError, warn
from dtypepin._base.selection import Named, parts
from dtypepin._base.torch_private import FAST_PATH_SEES_HOOKS
from dtypepin._pin.owners import check_storing
from dtypepin._pin.reads import own_floats


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
        check_storing(model, chosen, everything, dtype)
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
