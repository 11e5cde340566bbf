"""Dtype names, and the cast of one tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dtypepin._base.errors import PinError

#: The only dtypes that are ever cast, in or out.
FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})

#: ``x.float()`` costs half of ``x.to(torch.float32)``: no argument parsing.
CASTS: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float16: Tensor.half,
    torch.bfloat16: Tensor.bfloat16,
    torch.float32: Tensor.float,
    torch.float64: Tensor.double,
}

_NAMES: dict[str, torch.dtype] = {
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "fp32": torch.float32,
    "float": torch.float32,
    "float64": torch.float64,
    "fp64": torch.float64,
    "double": torch.float64,
}


def resolve_dtype(dtype: object, argument: str = "dtype") -> torch.dtype:
    """Turn ``torch.float32``, ``"float32"``, ``"torch.float32"`` or ``"fp32"`` into a dtype."""
    found = dtype
    if isinstance(dtype, str):
        found = _NAMES.get(dtype.lower().strip().removeprefix("torch."))
    if isinstance(found, torch.dtype) and found in FLOATS:
        return found
    raise PinError(
        f"{argument}: got {dtype!r}, expected float16, bfloat16, float32 or float64, as a "
        f"torch.dtype or by name ({', '.join(_NAMES)})"
    )


def short(dtype: torch.dtype | None) -> str:
    """``float32`` for ``torch.float32``; ``-`` for None."""
    return "-" if dtype is None else str(dtype).removeprefix("torch.")


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast one floating tensor; the very same object comes back where nothing is to be done."""
    return tensor if tensor.dtype is dtype else CASTS[dtype](tensor)
