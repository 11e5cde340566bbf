"""Real runs with real pins, and their errors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dtypepin._advice.inputs import Batch, as_float32
from dtypepin._advice.lower import Lower
from dtypepin._base.errors import PinError

Metric = Callable[[Any, Any], float]
#: The names of what is pinned.
Names = frozenset[str]


class Runs:
    """What was run, and what came out; nothing is run twice.

    Attributes:
        references: the float32 outputs, batch by batch.
        lows: those in low precision with nothing pinned.
        forwards: all that was computed, in forwards of the model.
        count: real runs, the one without pins included.
    """

    def __init__(
        self,
        lower: Lower,
        batches: list[Batch],
        metric: Metric | None,
        progress: Callable[[str], object],
    ) -> None:
        self.lower, self.batches = lower, batches
        self.metric, self.progress = metric, progress
        self.references: list[list[Tensor]] = []
        self.lows: list[list[Tensor]] = []
        self.forwards = 0.0
        self.count = 0
        self._errors: dict[tuple[Names, str], float] = {}

    def error(self, pinned: Names, output: str) -> float:
        """The error of a real run with real pins; remembered."""
        key = (pinned, output if pinned else "")
        if key not in self._errors:
            self.count += 1
            if pinned:
                self.progress(f"run with {len(pinned)} pins")
                self.forwards += 1
            outs = self._run(self.batches, pinned, output) if pinned else self.lows
            self._errors[key] = error(outs, self.references, self.metric)
        return self._errors[key]

    def known(self, output: str) -> dict[Names, float]:
        """What was run with this ``output`` so far, and its error."""
        return {pinned: e for (pinned, how), e in self._errors.items() if how in (output, "")}

    def l2(self, pinned: Names, output: str) -> float:
        """The relative L2 error, whatever the metric."""
        if not pinned:
            return error(self.lows, self.references, None)
        self.forwards += 1
        return error(self._run(self.batches, pinned, output), self.references, None)

    def error_on(self, batches: list[Batch], pinned: Names, output: str) -> tuple[float, float]:
        """The errors on other inputs, before and with these pins."""
        with torch.no_grad():
            references = [as_float32(self.lower.reference(batch)) for batch in batches]
        before = self._run(batches, frozenset(), output)
        after = self._run(batches, pinned, output)
        return error(before, references, self.metric), error(after, references, self.metric)

    def _run(self, batches: list[Batch], pinned: Names, output: str) -> list[list[Tensor]]:
        names = [f"^{re.escape(name)}$" for name in sorted(pinned)]
        pins = {"patterns": names, "inputs": "all", "output": output} if pinned else None
        return [self.lower.forward(batch, pins) for batch in batches]


def error(outs: list[list[Tensor]], references: list[list[Tensor]], metric: Metric | None) -> float:
    """How far outputs are from the float32 ones: by a metric, or relative in L2."""
    pairs = list(zip(references, outs, strict=True))
    if any(len(reference) != len(out) for reference, out in pairs):
        raise PinError("got outputs of another structure in low precision than in float32")
    if metric is not None:
        found = sum(float(metric(*pair)) for pair in pairs) / len(pairs)
        if found < 0:
            raise PinError(f"metric: got {found}, expected a number of 0 or more")
        return math.inf if math.isnan(found) else found
    wrong = right = 0.0
    for reference, out in pairs:
        for a, b in zip(reference, out, strict=True):
            # An infinity on both sides, as of a mask, is no error.
            wrong += float((b - a).masked_fill(a == b, 0.0).double().pow(2).sum())
            right += squared(a)
    found = math.sqrt(wrong / right if right else wrong)
    return math.inf if math.isnan(found) else found


def squared(reference: Tensor) -> float:
    """The squared norm of what is finite."""
    return float(reference.masked_fill(~reference.isfinite(), 0.0).double().pow(2).sum())
