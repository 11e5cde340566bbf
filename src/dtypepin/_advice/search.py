"""The purchase: the cheapest set that should meet the target, corrected by real runs."""

from __future__ import annotations

import math

from dtypepin._advice import cheaper
from dtypepin._advice.candidates import Candidate
from dtypepin._advice.runs import Names, Runs, squared
from dtypepin._advice.worth import Worth

#: Within this part of the squared target a plan is good enough.
_CLOSE = 0.92
#: No more than this is computed, in forwards of the model, after the first three runs.
_MOST_FORWARDS = 16.0


class Search:
    """One search for a plan.

    Attributes:
        before: the error with nothing pinned.
        target: the error wanted.
        best: what the plan pins.
        notes: what the reader of the plan has to know.
    """

    def __init__(
        self, runs: Runs, worth: Worth, has_gradients: bool, max_runs: int, notes: list[str]
    ) -> None:
        self.runs, self.worth = runs, worth
        self.has_gradients, self.max_runs, self.notes = has_gradients, max_runs, notes
        self.before = self.target = 0.0
        self.best: Names = frozenset()
        self._additive = True

    def error(self, pinned: Names) -> float:
        """The error of a real run with these pins."""
        return self.runs.error(pinned, self.worth.output)

    def is_known(self, pinned: Names) -> bool:
        """Whether these pins were run already."""
        return pinned in self.runs.known(self.worth.output)

    def runs_left(self) -> bool:
        """Whether one more run is allowed."""
        runs = self.runs.count - 1  # the first one is without pins
        dear = self.runs.forwards + 1 > _MOST_FORWARDS
        return runs < self.max_runs and not (self.has_gradients and runs >= 3 and dear)

    def buy(self, tolerance: float, absolute: float | None) -> None:
        """Find ``best``.

        Args:
            tolerance: the error wanted, as a part of the one with nothing pinned but what must be.
            absolute: the error wanted, instead.
        """
        worth, musts = self.worth, self.worth.musts()
        if any(not c.restorable for c in musts):
            worth.output = "keep"
            self.notes.append('cast back, a pinned output would overflow: output="keep"')
        self.before = self.error(frozenset())
        start = frozenset(c.name for c in musts)
        worth.base = self.error(start)
        self.target = absolute if absolute is not None else tolerance * worth.base
        self.best = start
        if not math.isfinite(worth.base):
            self._give_up_on_shares(start, absolute)
            return
        # The shares are relative to what the low run really lost.
        norm = sum(squared(tensor) for out in self.runs.references for tensor in out)
        l2 = worth.base
        if self.runs.metric is not None:
            l2 = self.runs.l2(start, worth.output)
        worth.are_parts_of(max(l2**2 * norm, 1e-300))
        if worth.base <= self.target:
            return
        everything = frozenset(c.name for c in worth.outermost())
        if not self.has_gradients:
            self.max_runs += 4 * math.ceil(math.log2(len(everything) + 1))
            self._shrink(everything, start)
            return
        if worth.output == "restore" and not self.runs.lower.whole:
            self._choose_output(musts)
            if worth.output == "keep":
                worth.base = self.error(start)
        order = worth.sets(musts)
        if everything not in order:
            order.append(everything)
        best = self.shortest(order)
        if best is not None:
            self.best = cheaper.make_cheaper(self, best, start)
            return
        if len(order) > 2 and self.runs_left():
            self.error(order[-2])
        self._settle_for_less()

    def _give_up_on_shares(self, start: Names, absolute: float | None) -> None:
        """Not finite, and no candidate is to blame: a part of an infinite error says nothing."""
        everything = frozenset(c.name for c in self.worth.outermost())
        if not math.isfinite(self.error(everything)):
            everything = start
        self.worth.base = self.worth.total = math.inf
        self.best, self.target = everything, 0.0 if absolute is None else absolute
        self.notes.append(
            "the output is not finite in low precision, and no candidate makes it so by itself: "
            "an operation between them does, in the root or in a module that is not a candidate"
        )

    def _settle_for_less(self) -> None:
        """The target cannot be met: the fewest pins that come near the best that was seen."""
        known = self.runs.known(self.worth.output)
        near = [pinned for pinned, error in known.items() if error <= 1.02 * min(known.values())]
        self.best = min(near, key=len)
        if self.error(self.best) > self.target:
            self.notes.append(
                f"the target of {self.target:.2e} was not reached; this is the best plan found"
            )

    def _shrink(self, pinned: Names, start: Names) -> None:
        """Without gradients: from everything pinned, leave out as much as the target allows."""
        if self.error(pinned) > self.target:
            self._settle_for_less()
            return
        prices = {c.name: c.price for c in self.worth.candidates}
        size = len(pinned)
        while size > 1 and self.runs_left():
            size = math.ceil(size / 2)
            names = sorted(pinned - start, key=lambda name: (-prices[name], name))
            for i in range(0, len(names), size):
                fewer = pinned - set(names[i : i + size])
                if fewer == start or not self.runs_left():
                    continue
                if self.error(fewer) <= self.target:
                    pinned = fewer
        self.best = pinned

    def _choose_output(self, musts: list[Candidate]) -> None:
        """``keep`` where the target is met for less, or at all, by the shares."""
        worth, prices = self.worth, {}
        for output in ("restore", "keep"):
            worth.output = output
            reached = [s for s in worth.sets(musts) if worth.predicted(s) <= self.target**2]
            prices[output] = worth.price(reached[0]) if reached else math.inf
        worth.output = "keep" if prices["keep"] < prices["restore"] else "restore"

    def shortest(self, order: list[Names]) -> Names | None:
        """The shortest prefix that meets the target: predicted, then between measured ones."""
        fails, meets = 0, len(order)
        sides = 0  # how often in a row the same side moved
        while fails + 1 < meets and self.runs_left():
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

    def _next(self, order: list[Names], fails: int, meets: int, halve: bool) -> int:
        """Which prefix to run, between one that fails and one that meets the target."""
        if halve or not self._additive:
            return (fails + meets) // 2
        base = self.worth.base**2
        gains = [base - self.worth.predicted(pinned) for pinned in order]
        above = self.error(order[fails]) ** 2
        if meets < len(order):
            below = self.error(order[meets]) ** 2
            slope = (above - below) / max(gains[meets] - gains[fails], 1e-300)
        else:
            slope = (base - above) / gains[fails] if fails and gains[fails] > 0 else 1.0
        wanted = gains[fails] + (above - self.target**2 * 0.97) / max(slope, 1e-300)
        inside = range(fails + 1, meets)
        return next((i for i in inside if gains[i] >= wanted), inside[-1])

    def _compare(self, pinned: Names, error: float) -> None:
        """Say so, once, where the shares predict nothing."""
        predicted = math.sqrt(self.worth.predicted(pinned))
        # Near the bottom, what little is left is noise of the estimate.
        if self._additive and predicted > 0.5 * self.worth.base:
            self._additive = 0.5 <= predicted / max(error, 1e-300) <= 2
            if not self._additive:
                self.notes.append(
                    f"additivity does not hold here: a run with {len(pinned)} pins was predicted "
                    f"at {predicted:.2e} and measured at {error:.2e}; searched by runs alone"
                )
