"""The advice as users ask for it: which modules to pin, for how much, and what it gives."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from dtypepin._advice import shares
from dtypepin._advice.candidates import Candidate, Candidates, find_candidates, run_low
from dtypepin._advice.inputs import check_numbers, checked
from dtypepin._advice.lower import Lower
from dtypepin._advice.plan import Plan, PlanRow
from dtypepin._advice.runs import Metric, Runs
from dtypepin._advice.search import Search
from dtypepin._advice.worth import NOTHING, Worth
from dtypepin._base.dtypes import resolve_dtype, short
from dtypepin._base.errors import PinError
from dtypepin._base.model_state import run_eagerly, untouched
from dtypepin._base.selection import Patterns

Price = Literal["flops", "ms", "bytes", "fewest"]

#: What a pin costs, all batches together.
_PRICES: dict[str, Callable[[Candidate], float]] = {
    "flops": lambda candidate: candidate.flops,
    "ms": lambda candidate: 1e3 * candidate.seconds,
    "bytes": lambda candidate: candidate.bytes,
}


def suggest(
    model: nn.Module,
    inputs: Any,
    *,
    autocast_dtype: torch.dtype | str | None = None,
    model_dtype: torch.dtype | str | None = None,
    tolerance: float = 0.5,
    absolute_tolerance: float | None = None,
    holdout: Any = None,
    metric: Metric | None = None,
    candidates: Candidates = None,
    class_candidates: Patterns = None,
    price: Price = "flops",
    probes: int | None = None,
    max_runs: int = 7,
    seed: int = 0,
    progress: Callable[[str], object] | None = None,
) -> Plan:
    """Find modules that are worth pinning to float32, in a constant number of passes.

    The share of every module in the output's error is estimated for all at once, the cheapest set
    that should meet the tolerance is bought, and real runs with real pins correct and verify it.
    The model runs in eval mode and is exactly as before afterwards, also on an exception or
    Ctrl-C. It does not look at training: gradients in low precision are not judged.

    Example:
        >>> import torch, dtypepin
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        >>> plan = dtypepin.suggest(model, torch.linspace(-1, 1, 256).reshape(32, 8).sin())
        >>> plan.error_measured <= plan.target
        True
        >>> with dtypepin.pin_dtype(model, **plan.pin_arguments()):
        ...     model(torch.ones(1, 8)).dtype
        torch.float32

    Args:
        model: a float32 model.
        inputs: a tensor, a tuple of positional or a dict of keyword arguments; a list or another
            iterable of these is several batches. The first dimension is taken for the batch.
        autocast_dtype: bfloat16 (the default) or float16; low precision is real autocast.
        model_dtype: instead, low precision is the model cast to this dtype as a whole.
        tolerance: the error wanted, as a part of the error with nothing pinned.
        absolute_tolerance: the error wanted, instead.
        holdout: more inputs, on which the plan is checked.
        metric: ``metric(reference, candidate)`` of two outputs as lists of float32 tensors, 0 for
            equal ones; by default the relative L2 error.
        candidates: patterns for names, or a predicate ``(name, module) -> bool``. By default
            modules with parameters and without children, and those whose own forward computes in
            the low dtype, as attention with functional matmuls does.
        class_candidates: patterns for class names.
        price: what a pin costs: ``"flops"`` of its module, ``"ms"`` measured, ``"bytes"`` more, or
            1 each for the ``"fewest"`` pins.
        probes: backward passes; by default enough for 32 samples, at least 2, at most 6.
        max_runs: real runs with pins, at most; more where there are no gradients.
        seed: for the random signs, and for what the model draws from torch's generators, which
            is the same in every run.
        progress: called with a line of text now and then; by default stderr where it is a terminal.

    Returns:
        The plan. ``print`` shows it, ``pin_arguments()`` go to ``pin_dtype`` and ``apply``.

    Raises:
        PinError: an argument is not valid, the model is not in float32, has pins already or gives
            no floating tensor, or there is nothing to choose from.

    Warns:
        PinWarning: the inputs look like random noise, or are few for the number of probes; the
            forward writes to parameters in place, which is the one thing that is not undone.

    Limits:
        The model must run more than once on the same inputs. Caches that a forward fills
        (``use_cache`` of language models) keep attention modules from being looked at alone.
        Random numbers from generators that are not torch's own differ from run to run.
    """
    model, batches, held = checked(model, inputs, holdout)
    check_numbers(tolerance, absolute_tolerance, probes, max_runs, seed)
    if callable(candidates) and class_candidates is not None:
        raise PinError("class_candidates: got patterns beside a predicate, expected one of them")
    if price not in (*_PRICES, "fewest"):
        raise PinError(f"price: got {price!r}, expected flops, ms, bytes or fewest")
    if model_dtype is not None and autocast_dtype is not None:
        raise PinError("got autocast_dtype and model_dtype, expected one of them")
    given = model_dtype if model_dtype is not None else autocast_dtype or "bfloat16"
    low = resolve_dtype(given, "model_dtype" if model_dtype is not None else "autocast_dtype")
    if low not in (torch.bfloat16, torch.float16):
        raise PinError(f"got {short(low)} as low precision, expected bfloat16 or float16")
    if progress is None:
        progress = _to_terminal if sys.stderr.isatty() else _silent
    with run_eagerly(), untouched(model) as state:
        lower = Lower(model, state, low, whole=model_dtype is not None, seed=seed)
        notes: list[str] = []
        runs = Runs(lower, batches, metric, progress)
        progress("one run in low precision")
        low_run = run_low(lower, batches)
        found = find_candidates(lower, low_run, candidates, class_candidates, notes)
        measured = shares.measure(lower, batches, found, low_run.came, probes, seed, progress)
        runs.lows, runs.references = low_run.outputs, measured.references
        runs.forwards = 1 + measured.forwards
        found = _only_measured(found, measured.has_gradients, notes)
        for candidate in found:
            cost = _PRICES.get(price)
            candidate.price = cost(candidate) / len(batches) if cost else 1.0
        search = Search(runs, Worth(found), measured.has_gradients, max_runs, notes)
        search.buy(tolerance, absolute_tolerance)
        held_out = runs.error_on(held, search.best, search.worth.output) if held else None
        return _plan(search, price, held_out)


def _only_measured(
    candidates: list[Candidate], has_gradients: bool, notes: list[str]
) -> list[Candidate]:
    """Without those that could not be run by themselves."""
    alone = [c.name for c in candidates if not c.measured]
    if alone:
        notes.append("could not be run by themselves, and are left out: " + ", ".join(alone))
    if not has_gradients:
        notes.append(
            "the output has no gradient: searched by leaving out groups of pins, run by run"
        )
    return [c for c in candidates if c.measured]


def _plan(search: Search, unit: str, held_out: tuple[float, float] | None) -> Plan:
    worth, runs = search.worth, search.runs
    rows = [_row(c, worth, c.name in search.best) for c in worth.candidates]
    rows.sort(key=lambda r: (not r.pinned, -max(r.gain, r.gain_keep) / max(r.price, 1e-12), r.name))
    measured = search.error(search.best)
    predicted = measured
    if math.isfinite(worth.base):
        predicted = math.sqrt(worth.predicted(search.best))
    return Plan(
        rows=rows,
        output=worth.output,
        unit=unit,
        error_before=search.before,
        target=search.target,
        error_predicted=predicted,
        error_measured=measured,
        error_held_out=held_out,
        reached=measured <= search.target,
        runs=runs.count,
        forward_equivalents=runs.forwards,
        notes=search.notes,
    )


def _row(candidate: Candidate, worth: Worth, pinned: bool) -> PlanRow:
    remark = ""
    if candidate.must:
        remark = "must: not finite in low precision"
    elif candidate.gain("restore") < -NOTHING * worth.total:
        remark = "harmful: its output is wider without a pin"
    elif worth.gain(candidate) < NOTHING * worth.total:
        remark = "useless"
    parts = (candidate.low, candidate.gain("restore"), candidate.gain("keep"))
    share, gain, gain_keep = (1.0 if candidate.must else part / worth.total for part in parts)
    return PlanRow(
        name=candidate.name,
        class_name=candidate.found.class_name,
        pinned=pinned,
        share=share,
        gain=gain,
        gain_keep=gain_keep,
        price=candidate.price,
        remark=remark,
    )


def _to_terminal(text: str) -> None:
    print(f"dtypepin.suggest: {text}", file=sys.stderr)


def _silent(text: str) -> None:
    pass
