"""The judge: what is said of each pin, by what was seen of it."""

from __future__ import annotations

import torch
from torch import nn

from dtypepin._audit.report import (
    BAD_INPUT,
    HONOURED,
    NEVER_RAN,
    NO_EFFECT,
    PARTLY,
    ModuleRow,
    PinRow,
)
from dtypepin._audit.seen import Seen, quoted
from dtypepin._base.dtypes import short
from dtypepin._pin.reads import own_floats
from dtypepin._pin.storage import stored_bytes


def row(seen: Seen, model: nn.Module, culprit: ModuleRow | None) -> PinRow:
    """The line of one pin.

    Args:
        seen: what was seen of it.
        model: the model, as it is at the end.
        culprit: the module where the first bad value came out, if there was any.

    Returns:
        The line, with the verdict and its reason.
    """
    calls = max(seen.calls, int(seen.ran))
    verdict, detail = _judge(seen, model, culprit)
    return PinRow(
        name=seen.row.name,
        class_name=seen.row.class_name,
        method=seen.rule.method,
        dtype=short(seen.rule.dtype),
        calls=calls,
        verdict=verdict,
        detail=detail,
        stored_bytes=seen.stored or stored_bytes(seen.module),
        cast_bytes=seen.bytes // max(calls, 1),
    )


def _judge(seen: Seen, model: nn.Module, culprit: ModuleRow | None) -> tuple[str, str]:
    want = short(seen.rule.dtype)
    if not seen.ran:
        here = any(seen.module is part for part in model.modules())
        gone = "its module was not called" if here else "its module has left the model"
        return NEVER_RAN, seen.cause or gone
    if seen.rule.method == "forward" and not seen.calls and not seen.ops:
        return NEVER_RAN, "only in another thread, which is not recorded"
    wrong = [f"{op} ran in {dtype}" for op, dtype in seen.ops if dtype != want]
    if wrong:
        return PARTLY, ", ".join(wrong) + seen.not_cast
    if seen.bad:
        if culprit is not None and culprit is not seen.row:
            return BAD_INPUT, f"first produced by {quoted(culprit.name)}"
        return BAD_INPUT, "it comes from outside the model"
    if seen.overflow or seen.row.overflowed:
        too_large = "its output is too large for the dtype it is cast back to"
        return HONOURED, seen.overflow or too_large
    if seen.without and seen.without <= {want}:
        return NO_EFFECT, f"it computes in {want} without pins too"
    if seen.without is not None and not seen.without and _loses_nothing(seen):
        return NO_EFFECT, "it computes nothing in floating point"
    if seen.without is not None and not seen.ops:
        return HONOURED, "it computes nothing in floating point, but casts"
    return HONOURED, ""


def _loses_nothing(seen: Seen) -> bool:
    """Whether a pin whose module only moves data casts to a wider dtype and back, if at all."""
    dtypes = [getattr(torch, name) for name in seen.row.dtype_in + seen.row.dtype_out]
    dtypes += [value.dtype for _, value in own_floats(seen.module)]
    want = seen.rule.dtype
    wider = all(torch.promote_types(dtype, want) is want for dtype in dtypes)
    return not seen.bytes or (wider and seen.rule.output == "restore")
