"""Which modules may be pinned: those that compute in low precision."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dtypepin._advice.inputs import Batch, leaves
from dtypepin._advice.lower import Lower
from dtypepin._audit.audit import audit
from dtypepin._base.dtypes import cast, short
from dtypepin._base.errors import PinError
from dtypepin._base.selection import Named, Patterns, find, named
from dtypepin._pin.verbs import select

Candidates = Patterns | Callable[[str, nn.Module], bool]
#: The floating dtypes that come into each module, call by call.
Came = dict[nn.Module, list[list[torch.dtype]]]


@dataclass
class Call:
    """One call of a candidate: its output in the graph, and how it differs.

    Attributes:
        exact: the float32 output on the input that comes in low precision.
        low: the output in low precision.
        pinned: the output with the pin, before it is cast back.
        restore: the dtype that a pinned output is cast back to.
        out: the output in the graph; the copies of it that went on.
    """

    exact: list[Tensor]
    low: list[Tensor]
    pinned: list[Tensor]
    restore: torch.dtype
    out: list[Tensor] = field(default_factory=list)
    went_on: list[Tensor] = field(default_factory=list)

    def errors(self, i: int, is_output: bool) -> tuple[Tensor, Tensor, Tensor]:
        """What the low, the pinned and the kept output differ by."""
        exact, low, pinned = self.exact[i], self.low[i], self.pinned[i]
        back, kept = cast(pinned, self.restore), pinned
        if not is_output:
            kept = cast(pinned, low.dtype)  # a wider one the next module rounds itself
        low, back, kept = (
            (other.float() - exact).nan_to_num(0.0, 0.0, 0.0) for other in (low, back, kept)
        )
        return low, back, kept


@dataclass
class Candidate:
    """A module that may be pinned. Errors are squared L2 errors that it alone makes in the output.

    Attributes:
        found: the module and its names.
        low: error of the module in low precision.
        pin: error of the module pinned, its output cast back.
        keep: the same with ``output="keep"``.
        price: what the pin costs, in the unit that was asked for.
        flops: floating-point operations of all its calls.
        seconds: time of all its calls, in float32.
        bytes: what its weights and outputs take more in float32.
        must: in low precision its output is not finite, where float32 gives a finite one.
        restorable: whether its float32 output stays finite when it is cast back.
        measured: whether it could be run by itself.
    """

    found: Named
    low: float = 0.0
    pin: float = 0.0
    keep: float = 0.0
    price: float = 0.0
    flops: float = 0.0
    seconds: float = 0.0
    bytes: float = 0.0
    must: bool = False
    restorable: bool = True
    measured: bool = True
    calls: list[Call] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its first dotted name."""
        return self.found.names[0]

    def gain(self, output: str) -> float:
        """The error that a pin with this ``output`` takes away; negative where it adds."""
        return self.low - (self.keep if output == "keep" else self.pin)


@dataclass
class LowRun:
    """One run in low precision.

    Attributes:
        outputs: of the model, as float32, batch by batch.
        came: what comes into each module.
        computes: how many ops compute in which dtype, by the name of the module.
    """

    outputs: list[list[Tensor]]
    came: Came
    computes: dict[str, dict[str, int]]


def run_low(lower: Lower, batches: list[Batch]) -> LowRun:
    """Run the model in low precision and look at who computes in what."""
    came: Came = {}
    twins = {twin: module for module, twin in lower.twin.items()}

    def look(module: nn.Module, args: Any, kwargs: Any) -> None:
        dtypes = [tensor.dtype for tensor in leaves((args, kwargs))]
        came.setdefault(twins[module], []).append(dtypes)

    with ExitStack() as hooks:
        for twin in twins:
            if not isinstance(twin, torch.jit.ScriptModule):  # it takes no hooks
                # In front: what the caller gave, before hooks of the user's.
                handle = twin.register_forward_pre_hook(look, with_kwargs=True, prepend=True)
                hooks.callback(handle.remove)
        report = hooks.enter_context(audit(lower.model, without_pins=False))
        outs = [lower.forward(batch, None) for batch in batches]
    lower.begin()  # without children that a forward has added
    return LowRun(outs, came, {row.name: row.compute for row in report.modules})


def find_candidates(
    lower: Lower, run: LowRun, chosen: Candidates, classes: Patterns, notes: list[str]
) -> list[Candidate]:
    """The modules that run and can be pinned, by default or as they were asked for.

    Args:
        lower: how the model runs in low precision.
        run: one such run.
        chosen: patterns, or a predicate.
        classes: patterns for class names.
        notes: what the reader of the plan has to know is added.

    Raises:
        PinError: there is none.
    """
    model = lower.exact
    everything = named(model)
    if chosen is None and classes is None:
        found = [m for m in everything if _computes_low(m, lower, run)]
    elif callable(chosen):
        found = [m for m in everything if chosen(m.names[0], m.module)]
    else:
        found = find(model, chosen, classes)
    found = [m for m in found if m.module is not model]
    refused = [m.names[0] for m in found if not _can_be_pinned(m, lower)]
    if refused:
        notes.append(f"left out, they cannot be pinned: {', '.join(refused)}")
    kept = [Candidate(m) for m in found if m.names[0] not in refused and m.module in run.came]
    if not kept:
        raise PinError(
            "candidates: got no module that runs and can be pinned, besides the root; "
            "expected patterns that match some"
        )
    return kept


def _computes_low(found: Named, lower: Lower, run: LowRun) -> bool:
    if short(lower.dtype) in run.computes.get(found.names[0], {}):
        return True
    leaf = not any(True for _ in found.module.children())
    return leaf and any(p.is_floating_point() for p in found.module.parameters(recurse=False))


def _can_be_pinned(found: Named, lower: Lower) -> bool:
    try:
        select(lower.twin[found.module], "^$", inputs="all")
    except PinError:
        return False
    return True
