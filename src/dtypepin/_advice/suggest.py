"""Which modules to pin: shares of the error, a purchase, and real runs that verify it."""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dtypepin._advice.plan import Plan, PlanRow
from dtypepin._advice.shares import Batch, Candidate, Lower, Shadows, as_float32, leaves, outputs
from dtypepin._audit.audit import audit
from dtypepin._base.dtypes import FLOATS, resolve_dtype, short
from dtypepin._base.errors import PinError, warn
from dtypepin._base.model_state import run_eagerly, untouched
from dtypepin._base.selection import Named, Patterns, find, named
from dtypepin._pin import hooks
from dtypepin._pin.verbs import select

Metric = Callable[[Any, Any], float]
Candidates = Patterns | Callable[[str, nn.Module], bool]
Price = Literal["flops", "ms", "bytes", "fewest"]

#: What a pin costs, all batches together.
_PRICES: dict[str, Callable[[Candidate], float]] = {
    "flops": lambda candidate: candidate.flops,
    "ms": lambda candidate: 1e3 * candidate.seconds,
    "bytes": lambda candidate: candidate.bytes,
}
#: Within this part of the squared target a plan is good enough.
_CLOSE = 0.92
#: No more than this is computed, in forwards of the model, after the first three runs.
_MOST_FORWARDS = 16.0
#: How often a plan that meets the target is tried with less.
_MOST_TRIES = 4
#: Only so many of the dearest pins.
_MOST_SWAPS = 32
#: A gain below this part of the squared error is noise.
_NOTHING = 1e-4


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
    model, batches, held = _checked(model, inputs, holdout)
    _check_numbers(tolerance, absolute_tolerance, probes, max_runs, seed)
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
        search = _Search(model, batches, lower, metric, progress)
        search.find_candidates(candidates, class_candidates)
        search.measure_shares(probes, seed)
        for candidate in search.candidates:
            cost = _PRICES.get(price)
            candidate.price = cost(candidate) / len(batches) if cost else 1.0
        search.buy(tolerance, absolute_tolerance, max_runs)
        held_out = None
        if held:
            held_out = search.error_on(held)
        return search.plan(price, held_out)


class _Search:
    """One search for a plan."""

    def __init__(
        self,
        model: nn.Module,
        batches: list[Batch],
        lower: Lower,
        metric: Metric | None,
        progress: Callable[[str], object],
    ) -> None:
        self.model, self.batches, self.lower, self.progress = model, batches, lower, progress
        self.metric = metric
        self.notes: list[str] = []
        self.candidates: list[Candidate] = []
        self.dtypes: dict[nn.Module, list[list[torch.dtype]]] = {}
        self.references: list[list[Tensor]] = []
        self.forwards = 0.0
        # By what is pinned, with the present ``output``.
        self.errors: dict[frozenset[str], float] = {}
        self.runs = 0
        self.output = "restore"
        self.additive = True

    # What could be pinned.

    def find_candidates(self, chosen: Candidates, classes: Patterns) -> None:
        """Look at one low-precision run: who computes in the low dtype, and what comes in."""
        self.progress("one run in low precision")
        lows, computes = self._run_low()
        self.lower.begin()  # without children that a forward has added
        everything = named(self.model)
        if chosen is None and classes is None:
            found = [m for m in everything if self._is_candidate(m, computes)]
        elif callable(chosen):
            found = [m for m in everything if chosen(m.names[0], m.module)]
        else:
            found = find(self.model, chosen, classes)
        found = [m for m in found if m.module is not self.model]
        refused = [m.names[0] for m in found if not self._can_be_pinned(m)]
        if refused:
            self.notes.append(f"left out, they cannot be pinned: {', '.join(refused)}")
        self.candidates = [
            Candidate(m) for m in found if m.names[0] not in refused and m.module in self.dtypes
        ]
        if not self.candidates:
            raise PinError(
                "candidates: got no module that runs and can be pinned, besides the root; "
                "expected patterns that match some"
            )
        self.lows = lows

    def _run_low(self) -> tuple[list[list[Tensor]], dict[str, dict[str, int]]]:
        """Low-precision outputs; and the dtypes that come into modules, and those they use."""
        twins = {twin: module for module, twin in self.lower.twin.items()}

        def look(module: nn.Module, args: Any, kwargs: Any) -> None:
            came = [tensor.dtype for tensor in leaves((args, kwargs))]
            self.dtypes.setdefault(twins[module], []).append(came)

        outs = []
        with ExitStack() as hooks:
            for twin in twins:
                if not isinstance(twin, torch.jit.ScriptModule):  # it takes no hooks
                    # In front: what the caller gave, before hooks of the user's.
                    handle = twin.register_forward_pre_hook(look, with_kwargs=True, prepend=True)
                    hooks.callback(handle.remove)
            report = hooks.enter_context(audit(self.lower.model, without_pins=False))
            outs = [self.lower.forward(batch, None) for batch in self.batches]
        self.forwards += 1
        return outs, {row.name: row.compute for row in report.modules}

    def _is_candidate(self, found: Named, computes: dict[str, dict[str, int]]) -> bool:
        if short(self.lower.dtype) in computes.get(found.names[0], {}):
            return True
        leaf = not any(True for _ in found.module.children())
        return leaf and any(p.is_floating_point() for p in found.module.parameters(recurse=False))

    def _can_be_pinned(self, found: Named) -> bool:
        try:
            select(self.lower.twin[found.module], "^$", inputs="all")
        except PinError:
            return False
        return True

    # What each is worth.

    def measure_shares(self, probes: int | None, seed: int) -> None:
        """Run the float32 reference with shadows, and the probes backward through it."""
        generator = torch.Generator().manual_seed(seed)
        shadows = Shadows(self.lower, self.candidates, self.dtypes)
        has_gradients = True
        size, probes_done = 0, 0
        for number, batch in enumerate(self.batches):
            self.progress(f"shares: batch {number + 1} of {len(self.batches)}")
            with shadows.watching(), torch.enable_grad():
                out = outputs(self.lower.reference(batch))
                if not out:
                    raise PinError(
                        "got an output without floating tensors, in tensors, dicts, lists, tuples "
                        "or dataclasses; expected some, to compare"
                    )
                self.references.append(as_float32(out))
                rows = out[0].shape[0] if out[0].dim() else 1
                if not rows or any(tensor.isnan().any() for tensor in out):
                    what = "nan as the float32 output" if rows else "a batch without samples"
                    raise PinError(f"inputs: got {what}, expected numbers to compare with")
                done = probes or max(2, min(6, math.ceil(32 / (rows * len(self.batches)))))
                size += rows * done
                probes_done += done
                try:
                    for _ in range(done if has_gradients else 0):
                        has_gradients = shadows.add_probe(out, generator, 1 / done)
                        if not has_gradients:
                            break
                except RuntimeError:  # an op without a derivative
                    has_gradients = False
            shadows.forget()
        leaf = [c for c in self.candidates if not any(c.found.module.children())]
        total_flops = sum(c.flops for c in leaf) or 1.0
        # The reference, two or three runs of every candidate, and backwards without weights.
        shadow = (3 if self.lower.whole else 2) * sum(c.flops for c in self.candidates)
        self.forwards += 1 + shadow / total_flops + probes_done / len(self.batches)
        alone = [c.name for c in self.candidates if not c.measured]
        if alone:
            self.notes.append(
                "could not be run by themselves, and are left out: " + ", ".join(alone)
            )
            self.candidates = [c for c in self.candidates if c.measured]
        if not has_gradients:
            self.notes.append(
                "the output has no gradient: searched by leaving out groups of pins, run by run"
            )
        elif size < 16:
            warn(
                f"inputs: samples times probes are {size}, expected 16 or more for shares to be "
                "trusted; give more samples, or probes="
            )
        if any(_looks_like_noise(tensor) for batch in self.batches for tensor in leaves(batch)):
            warn(
                "inputs: they look like random noise; rounding errors depend on the data, so use "
                "real inputs"
            )
        self.has_gradients = has_gradients

    # What is bought.

    def error(self, pinned: frozenset[str]) -> float:
        """The error of a real run with real pins; remembered."""
        if pinned not in self.errors:
            self.runs += 1
            if pinned:
                self.progress(f"run with {len(pinned)} pins")
                self.forwards += 1
            self.errors[pinned] = self._error(
                [self.lower.forward(batch, self._pins(pinned)) for batch in self.batches]
                if pinned
                else self.lows,
                self.references,
            )
        return self.errors[pinned]

    def _error(self, outs: list[list[Tensor]], references: list[list[Tensor]]) -> float:
        pairs = list(zip(references, outs, strict=True))
        if any(len(reference) != len(out) for reference, out in pairs):
            raise PinError("got outputs of another structure in low precision than in float32")
        if self.metric is not None:
            error = sum(float(self.metric(*pair)) for pair in pairs) / len(pairs)
            if error < 0:
                raise PinError(f"metric: got {error}, expected a number of 0 or more")
            return math.inf if math.isnan(error) else error
        wrong = right = 0.0
        for reference, out in pairs:
            for a, b in zip(reference, out, strict=True):
                # An infinity on both sides, as of a mask, is no error.
                wrong += float((b - a).masked_fill(a == b, 0.0).double().pow(2).sum())
                right += _squared(a)
        error = math.sqrt(wrong / right if right else wrong)
        return math.inf if math.isnan(error) else error

    def _pins(self, pinned: frozenset[str]) -> dict[str, Any]:
        return {
            "patterns": [f"^{re.escape(name)}$" for name in sorted(pinned)],
            "inputs": "all",
            "output": self.output,
        }

    def gain(self, candidate: Candidate) -> float:
        return candidate.low - (candidate.keep if self.output == "keep" else candidate.pin)

    def sets(self, musts: list[Candidate]) -> list[frozenset[str]]:
        """Growing sets to pin, the best gain for the price first."""
        useful = [c for c in self.candidates if not c.must and self.gain(c) > _NOTHING * self.total]
        useful.sort(key=lambda c: self.gain(c) / max(c.price, 1e-12), reverse=True)
        chosen = {c.name: c for c in musts}
        found = [frozenset(chosen)]
        for candidate in useful:
            if any(name in chosen for name in self.holders[candidate.name]):
                continue
            inside = [chosen[name] for name in self.inside[candidate.name] if name in chosen]
            if inside:
                worth = sum(self.gain(c) for c in inside)
                if any(c.must for c in inside) or self.gain(candidate) <= worth:
                    continue
                for c in inside:
                    del chosen[c.name]
            chosen[candidate.name] = candidate
            found.append(frozenset(chosen))
        return found

    def predicted(self, pinned: frozenset[str]) -> float:
        """The squared error that the shares predict."""
        saved = sum(self.gain(c) for c in self.candidates if c.name in pinned and not c.must)
        return max(self.base**2 * (1 - saved / self.total), 0.0)

    def buy(self, tolerance: float, absolute: float | None, max_runs: int) -> None:
        musts = [c for c in self.candidates if c.must]
        self._find_parts()
        held = {c.name for c in musts}
        musts = [c for c in musts if held.isdisjoint(self.holders[c.name])]
        if any(not c.restorable for c in musts):
            self.output = "keep"
            self.notes.append('cast back, a pinned output would overflow: output="keep"')
        before = self.error(frozenset())
        start = frozenset(c.name for c in musts)
        self.base = self.error(start)
        self.target = absolute if absolute is not None else tolerance * self.base
        self.before = before
        self.best = start
        if not math.isfinite(self.base):
            self._give_up_on_shares(start, absolute)
            return
        # The shares are relative to what the low run really lost.
        squared = sum(_squared(tensor) for out in self.references for tensor in out)
        l2 = self._l2(start) if self.metric is not None else self.base
        self.total = max(l2**2 * squared, 1e-300)
        everything = self._outermost()
        known = sum(c.low for c in everything if not c.must)
        if known > self.total:  # more than there is: noise of the estimate
            for c in self.candidates:
                c.low, c.pin, c.keep = (v * self.total / known for v in (c.low, c.pin, c.keep))
        if self.base <= self.target or max_runs < 1:
            return
        all_of_it = frozenset(c.name for c in everything)
        if not self.has_gradients:
            more = max_runs + 4 * math.ceil(math.log2(len(all_of_it) + 1))
            self._shrink(all_of_it, start, more)
            return
        if self.output == "restore" and not self.lower.whole:
            self._choose_output(musts)
            if self.output == "keep" and start:
                self.errors = {frozenset(): before}  # the others were run with "restore"
                self.base = self.error(start)
        order = self.sets(musts)
        if all_of_it not in order:
            order.append(all_of_it)
        best = self._search(order, max_runs)
        if best is not None:
            self._make_cheaper(best, start, max_runs)
            return
        if len(order) > 2 and self._runs_left(max_runs):
            self.error(order[-2])
        self._settle_for_less()

    def _give_up_on_shares(self, start: frozenset[str], absolute: float | None) -> None:
        """Not finite, and no candidate is to blame: a part of an infinite error says nothing."""
        everything = frozenset(c.name for c in self._outermost())
        if not math.isfinite(self.error(everything)):
            everything = start
        self.base = self.total = math.inf
        self.best, self.target = everything, 0.0 if absolute is None else absolute
        self.notes.append(
            "the output is not finite in low precision, and no candidate makes it so by itself: "
            "an operation between them does, in the root or in a module that is not a candidate"
        )

    def _outermost(self) -> list[Candidate]:
        """The fewest candidates that hold all others."""
        return [c for c in self.candidates if not self.holders[c.name]]

    def _find_parts(self) -> None:
        """Which candidates are in which: a set to pin never holds both."""
        names = {c.found.module: c.name for c in self.candidates}
        self.inside = {
            c.name: [names[part] for part in c.found.module.modules() if part in names][1:]
            for c in self.candidates
        }
        self.holders: dict[str, list[str]] = {c.name: [] for c in self.candidates}
        for name, parts in self.inside.items():
            for part in parts:
                self.holders[part].append(name)

    def _settle_for_less(self) -> None:
        """The target cannot be met: the fewest pins that come near the best that was seen."""
        least = min(self.errors.values())
        near = [pinned for pinned, error in self.errors.items() if error <= 1.02 * least]
        self.best = min(near, key=len)
        if self.error(self.best) > self.target:
            self.notes.append(
                f"the target of {self.target:.2e} was not reached; this is the best plan found"
            )

    def _shrink(self, pinned: frozenset[str], start: frozenset[str], max_runs: int) -> None:
        """Without gradients: from everything pinned, leave out as much as the target allows."""
        if self.error(pinned) > self.target:
            self._settle_for_less()
            return
        prices = {c.name: c.price for c in self.candidates}
        size = len(pinned)
        while size > 1 and self._runs_left(max_runs):
            size = math.ceil(size / 2)
            names = sorted(pinned - start, key=lambda name: (-prices[name], name))
            for i in range(0, len(names), size):
                fewer = pinned - set(names[i : i + size])
                if fewer == start or not self._runs_left(max_runs):
                    continue
                if self.error(fewer) <= self.target:
                    pinned = fewer
        self.best = pinned

    def _l2(self, pinned: frozenset[str]) -> float:
        metric, self.metric = self.metric, None
        try:
            if not pinned:
                return self._error(self.lows, self.references)
            self.forwards += 1
            pins = self._pins(pinned)
            return self._error([self.lower.forward(b, pins) for b in self.batches], self.references)
        finally:
            self.metric = metric

    def _choose_output(self, musts: list[Candidate]) -> None:
        """``keep`` where the target is met for less, or at all, by the shares."""
        prices = {}
        for output in ("restore", "keep"):
            self.output = output
            reached = [s for s in self.sets(musts) if self.predicted(s) <= self.target**2]
            prices[output] = self._price(reached[0]) if reached else math.inf
        self.output = "keep" if prices["keep"] < prices["restore"] else "restore"

    def _price(self, pinned: frozenset[str]) -> float:
        return sum(c.price for c in self.candidates if c.name in pinned)

    def _search(self, order: list[frozenset[str]], max_runs: int) -> frozenset[str] | None:
        """The shortest prefix that meets the target: predicted, then between measured ones."""
        fails, meets = 0, len(order)
        sides = 0  # how often in a row the same side moved
        while fails + 1 < meets and self._runs_left(max_runs):
            i = self._next(order, fails, meets, halve=sides > 1)
            error = self.error(order[i])
            self._compare(order[i], error)
            if error <= self.target:
                sides = max(sides, 0) + 1 if meets < len(order) else 0
                meets = i
                if error**2 >= _CLOSE * self.target**2:
                    break
            else:
                sides = 0 if meets == len(order) else sides + 1
                fails = i
        return order[meets] if meets < len(order) else None

    def _next(self, order: list[frozenset[str]], fails: int, meets: int, halve: bool) -> int:
        """Which prefix to run, between one that fails and one that meets the target."""
        if halve or not self.additive:
            return (fails + meets) // 2
        gains = [self.base**2 - self.predicted(pinned) for pinned in order]
        above = self.error(order[fails]) ** 2
        if meets < len(order):
            below = self.error(order[meets]) ** 2
            slope = (above - below) / max(gains[meets] - gains[fails], 1e-300)
        else:
            slope = (self.base**2 - above) / gains[fails] if fails and gains[fails] > 0 else 1.0
        wanted = gains[fails] + (above - self.target**2 * 0.97) / max(slope, 1e-300)
        inside = range(fails + 1, meets)
        return next((i for i in inside if gains[i] >= wanted), inside[-1])

    def _runs_left(self, max_runs: int) -> bool:
        runs = self.runs - 1  # the first one is without pins
        enough = self.has_gradients and runs >= 3 and self.forwards + 1 > _MOST_FORWARDS
        return runs < max_runs and not enough

    def _compare(self, pinned: frozenset[str], error: float) -> None:
        """Say so, once, where the shares predict nothing."""
        predicted = math.sqrt(self.predicted(pinned))
        # Near the bottom, what little is left is noise of the estimate.
        if self.additive and predicted > 0.5 * self.base:
            self.additive = 0.5 <= predicted / max(error, 1e-300) <= 2
            if not self.additive:
                self.notes.append(
                    f"additivity does not hold here: a run with {len(pinned)} pins was predicted "
                    f"at {predicted:.2e} and measured at {error:.2e}; searched by runs alone"
                )

    def _make_cheaper(self, pinned: frozenset[str], start: frozenset[str], max_runs: int) -> None:
        """Try what costs less and should still meet the target, the largest saving first."""
        for _ in range(_MOST_TRIES):
            slack = self.target**2 - self.error(pinned) ** 2
            slack *= self.total / self.base**2
            tries = (
                (saved, pinned - {name} | set(instead))
                for saved, lost, name, instead in self._cheaper(pinned, start)
                if lost <= slack and saved > 0
            )
            tries = ((saved, other) for saved, other in tries if other not in self.errors)
            _, cheaper = max(tries, key=lambda found: found[0], default=(0.0, start))
            if cheaper == start or not self._runs_left(max_runs):
                break
            if self.error(cheaper) <= self.target:
                pinned = cheaper
        self.best = pinned

    def _cheaper(
        self, pinned: frozenset[str], start: frozenset[str]
    ) -> Iterator[tuple[float, float, str, list[str]]]:
        """The price that is saved, the gain lost, which pin to leave out, what to pin instead."""
        by_name = {c.name: c for c in self.candidates}
        useful = [c for c in self.candidates if self.gain(c) > _NOTHING * self.total]
        useful = [c for c in useful if c.name not in pinned and not self._overlaps(c, pinned)]
        dearest = sorted(pinned - start, key=lambda name: (-by_name[name].price, name))
        for name in dearest[:_MOST_SWAPS]:
            one = by_name[name]
            yield one.price, self.gain(one), name, []
            for other in useful:
                # Two estimates may both be wrong.
                lost = 1.2 * self.gain(one) - 0.8 * self.gain(other)
                yield one.price - other.price, lost, name, [other.name]
            # Parts pinned together gain more than one by one: float32 goes from one to the other.
            # So their part in the whole is told by their shares.
            parts = [by_name[part] for part in self.inside[name] if not self.inside[part]]
            parts.sort(key=lambda c: c.low / max(c.price, 1e-12), reverse=True)
            shares = sum(c.low for c in parts)
            for n in range(1, len(parts) + 1 if shares else 0):
                price, share = sum(c.price for c in parts[:n]), sum(c.low for c in parts[:n])
                lost = self.gain(one) * (1 - share / shares)
                yield one.price - price, lost, name, [c.name for c in parts[:n]]

    def _overlaps(self, candidate: Candidate, pinned: frozenset[str]) -> bool:
        """Whether it is part of something pinned, or holds something pinned."""
        others = (*self.holders[candidate.name], *self.inside[candidate.name])
        return not pinned.isdisjoint(others)

    # The outcome.

    def _predicted_error(self) -> float:
        if not math.isfinite(self.base):
            return self.error(self.best)
        return math.sqrt(self.predicted(self.best))

    def error_on(self, batches: list[Batch]) -> tuple[float, float]:
        """The errors on other inputs, before and with the plan."""
        with torch.no_grad():
            references = [as_float32(self.lower.reference(batch)) for batch in batches]
        before = [self.lower.forward(batch, None) for batch in batches]
        pins = self._pins(self.best) if self.best else None
        after = [self.lower.forward(batch, pins) for batch in batches]
        return self._error(before, references), self._error(after, references)

    def plan(self, unit: str, held_out: tuple[float, float] | None) -> Plan:
        rows = []
        for c in self.candidates:
            remark = ""
            if c.must:
                remark = "must: not finite in low precision"
            elif c.low - c.pin < -_NOTHING * self.total:
                remark = "harmful: its output is wider without a pin"
            elif self.gain(c) < _NOTHING * self.total:
                remark = "useless"
            rows.append(
                PlanRow(
                    name=c.name,
                    class_name=c.found.class_name,
                    pinned=c.name in self.best,
                    share=1.0 if c.must else c.low / self.total,
                    gain=1.0 if c.must else (c.low - c.pin) / self.total,
                    gain_keep=1.0 if c.must else (c.low - c.keep) / self.total,
                    price=c.price,
                    remark=remark,
                )
            )
        rows.sort(
            key=lambda r: (not r.pinned, -max(r.gain, r.gain_keep) / max(r.price, 1e-12), r.name)
        )
        measured = self.error(self.best)
        return Plan(
            rows=rows,
            output=self.output,
            unit=unit,
            error_before=self.before,
            target=self.target,
            error_predicted=self._predicted_error(),
            error_measured=measured,
            error_held_out=held_out,
            reached=measured <= self.target,
            runs=self.runs,
            forward_equivalents=self.forwards,
            notes=self.notes,
        )


def _batches(inputs: Any, what: str) -> list[Batch]:
    def batch(value: Any) -> Batch:
        if isinstance(value, dict) or hasattr(value, "keys"):
            return (), dict(value)
        if isinstance(value, tuple):
            return value, {}
        return (value,), {}

    if isinstance(inputs, (Tensor, tuple, dict)) or hasattr(inputs, "keys"):
        return [batch(inputs)]
    if not isinstance(inputs, Iterable) or isinstance(inputs, (str, bytes)):
        raise PinError(
            f"{what}: got {type(inputs).__name__}, expected a tensor, a tuple of arguments, a dict "
            "of keyword arguments, or an iterable of these"
        )
    values = list(inputs)
    if not values:
        raise PinError(f"{what}: got no batch, expected one or more")
    if any(isinstance(value, list) for value in values):
        raise PinError(
            f"{what}: got a list as one batch, expected a tensor, a tuple of arguments or a dict "
            "of keyword arguments; of a loader that gives inputs and labels: "
            "[x for x, _ in loader]; for a forward that takes a list: [(the_list,)]"
        )
    return [batch(value) for value in values]


def _check_signature(model: nn.Module, batches: list[Batch], what: str) -> None:
    if model._forward_pre_hooks or type(model).__call__ is not nn.Module.__call__:
        return  # they may change the arguments
    try:
        # Not that of what a decorator wraps, which may be handed more or less.
        signature = inspect.signature(model.forward, follow_wrapped=False)
    except (TypeError, ValueError):
        return  # it has none that Python knows
    for args, kwargs in batches:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise PinError(
                f"{what}: got a batch that forward of {type(model).__name__} does not take "
                f"({error}), expected its arguments alone, in a tuple or a dict, no labels; "
                "a named tuple that is one argument goes into a tuple: (batch,)"
            ) from None


def _checked(
    model: nn.Module, inputs: Any, holdout: Any
) -> tuple[nn.Module, list[Batch], list[Batch]]:
    """The model without wrappers, and the batches; refuses what could not be compared."""
    batches = _batches(inputs, "inputs")
    held = [] if holdout is None else _batches(holdout, "holdout")
    everything = named(model)
    _check_signature(everything[0].module, batches, "inputs")
    _check_signature(everything[0].module, held, "holdout")
    for found in everything:
        for name, value in found.module.named_parameters(prefix=found.names[0], recurse=False):
            if is_lazy(value):
                raise PinError(f"model: {name!r} is not initialised yet; run one forward first")
            if value.dtype in FLOATS and value.dtype is not torch.float32:
                raise PinError(
                    f"model: got {name!r} in {short(value.dtype)}, expected a float32 model to "
                    "compare with; model_dtype= is for one that will be cast as a whole"
                )
        if any(True for _ in hooks.on(found.module)):
            raise PinError(
                f"model: got {found.names[0]!r} pinned already, expected no pins; unpin(model) "
                "takes them off"
            )
    return everything[0].module, batches, held


def _check_numbers(
    tolerance: float, absolute: float | None, probes: int | None, max_runs: int, seed: int
) -> None:
    def check(name: str, value: Any, kind: type, good: Callable[[Any], bool], what: str) -> None:
        right = isinstance(value, (int, kind)) and not isinstance(value, bool)
        if not right or not good(value):
            raise PinError(f"{name}: got {value!r}, expected {what}")

    if absolute is None:
        between = "a number between 0 and 1"
        check("tolerance", tolerance, float, lambda value: 0 < value < 1, between)
    else:
        more = "a number above 0"
        check("absolute_tolerance", absolute, float, lambda v: 0 < v < math.inf, more)
    if probes is not None:
        check("probes", probes, int, lambda value: value > 0, "a number above 0")
    check("max_runs", max_runs, int, lambda value: value > 0, "a number above 0")
    check("seed", seed, int, lambda value: True, "an integer")


def _squared(reference: Tensor) -> float:
    """The squared norm of what is finite."""
    return float(reference.masked_fill(~reference.isfinite(), 0.0).double().pow(2).sum())


def _looks_like_noise(tensor: Tensor) -> bool:
    """Whether a tensor has the moments of ``torch.randn`` and neighbours that know nothing."""
    values = tensor.detach().double().flatten()
    if values.numel() < 256:
        return False
    mean, std = values.mean(), values.std()
    if abs(float(mean)) > 0.1 or abs(float(std) - 1) > 0.1:
        return False
    normal = (values - mean) / std
    together = float((normal[1:] * normal[:-1]).mean())
    return abs(float((normal**4).mean()) - 3) < 0.5 and abs(together) < 0.1


def _to_terminal(text: str) -> None:
    print(f"dtypepin.suggest: {text}", file=sys.stderr)


def _silent(text: str) -> None:
    pass
