"""What counts as computing, and in which dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dtypepin._base.dtypes import short
from dtypepin._base.nested import map_tensors

#: Ops that move, make or compare data and compute nothing in it; views are told by their schema.
_MOVES = frozenset(
    """
    _to_copy copy_ copy clone contiguous cat stack index_select gather embedding scatter scatter_
    index index_put index_put_ _index_put_impl_ masked_fill masked_fill_ where select_scatter
    slice_scatter constant_pad_nd empty_like zeros_like ones_like full_like rand_like randn_like
    new_empty new_zeros new_ones new_full new_empty_strided fill_ zero_ bernoulli_ uniform_ normal_
    random_ flip roll repeat _unsafe_view _reshape_copy equal
    item _local_scalar_dense is_nonzero lift_fresh lift_fresh_copy set_ resize_ tril triu tril_
    triu_ sort topk detach masked_select masked_scatter masked_scatter_ diag_embed index_fill
    index_fill_ take put put_ im2col pixel_shuffle pixel_unshuffle channel_shuffle _unique _unique2
    unique_dim unique_consecutive diagonal_scatter as_strided_scatter expand_copy
    """.split()  # noqa: SIM905 (one word a line otherwise)
)


def name_of(op: Any) -> str:
    """``add_`` for ``aten::add_.Tensor``."""
    name: str = op._schema.name.partition("::")[2]
    return name


def computes_in(op: Any, values: Any, out: Any) -> str | None:
    """The dtype that an op computes in: that of its floating inputs, promoted; None for a move.

    Tensors without dimensions do not count beside others, as in torch's own promotion.

    Args:
        op: the overload that ran.
        values: its arguments, any nesting.
        out: its result.

    Returns:
        The short name of the dtype, or None.
    """
    returns, name = op._schema.returns, name_of(op)
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    if view or name in _MOVES or "_pad" in name:
        return None
    if isinstance(out, Tensor) and not dtypes(out):
        return None  # a comparison, or a search for places
    found: dict[bool, torch.dtype] = {}

    def look(tensor: Tensor) -> Tensor:
        small = tensor.dim() == 0
        known = found.get(small, tensor.dtype)
        found[small] = torch.promote_types(known, tensor.dtype)
        return tensor

    map_tensors(values, look)
    dtype = found.get(False, found.get(True))
    return None if dtype is None else short(dtype)


def dtypes(values: Any) -> list[str]:
    """The floating dtypes in a nested value."""
    found: dict[str, None] = {}

    def look(tensor: Tensor) -> Tensor:
        found[short(tensor.dtype)] = None
        return tensor

    map_tensors(values, look)
    return list(found)
