"""What sets of pins are worth by their shares, without running anything."""

from __future__ import annotations

from dtypepin._advice.candidates import Candidate
from dtypepin._advice.runs import Names

#: A gain below this part of the squared error is noise.
NOTHING = 1e-4


class Worth:
    """The candidates, which of them are in which, and what pinning them should give.

    Attributes:
        candidates: all of them.
        inside: the names of the candidates within each.
        holders: the names of the candidates round each.
        output: the ``output`` that pins would get.
        base: the error with nothing pinned but what must be.
        total: the squared error that the shares are parts of.
    """

    def __init__(self, candidates: list[Candidate]) -> None:
        self.candidates = candidates
        self.output = "restore"
        self.base = self.total = 1.0
        names = {c.found.module: c.name for c in candidates}
        self.inside = {
            c.name: [names[part] for part in c.found.module.modules() if part in names][1:]
            for c in candidates
        }
        self.holders: dict[str, list[str]] = {c.name: [] for c in candidates}
        for name, parts in self.inside.items():
            for part in parts:
                self.holders[part].append(name)

    def gain(self, candidate: Candidate) -> float:
        """What a pin takes away of the squared error."""
        return candidate.gain(self.output)

    def price(self, pinned: Names) -> float:
        """What these pins cost."""
        return sum(c.price for c in self.candidates if c.name in pinned)

    def predicted(self, pinned: Names) -> float:
        """The squared error that the shares predict."""
        saved = sum(self.gain(c) for c in self.candidates if c.name in pinned and not c.must)
        return max(self.base**2 * (1 - saved / self.total), 0.0)

    def musts(self) -> list[Candidate]:
        """Those that are not finite in low precision, the outermost alone."""
        held = {c.name for c in self.candidates if c.must}
        every = [c for c in self.candidates if c.must]
        return [c for c in every if held.isdisjoint(self.holders[c.name])]

    def outermost(self) -> list[Candidate]:
        """The fewest candidates that hold all others."""
        return [c for c in self.candidates if not self.holders[c.name]]

    def overlaps(self, candidate: Candidate, pinned: Names) -> bool:
        """Whether it is part of something pinned, or holds something pinned."""
        others = (*self.holders[candidate.name], *self.inside[candidate.name])
        return not pinned.isdisjoint(others)

    def are_parts_of(self, total: float) -> None:
        """The shares are parts of this squared error; scaled down where they are more than all."""
        self.total = total
        known = sum(c.low for c in self.outermost() if not c.must)
        if known > total:  # more than there is: noise of the estimate
            for c in self.candidates:
                c.low, c.pin, c.keep = (v * total / known for v in (c.low, c.pin, c.keep))

    def sets(self, musts: list[Candidate]) -> list[Names]:
        """Growing sets to pin, the best gain for the price first."""
        useful = [c for c in self.candidates if not c.must and self.gain(c) > NOTHING * self.total]
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
