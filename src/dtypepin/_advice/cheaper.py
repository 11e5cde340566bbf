"""Making a plan that meets the target cheaper: what can be left out, or pinned instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from dtypepin._advice.runs import Names
from dtypepin._advice.worth import NOTHING, Worth

#: How often a plan that meets the target is tried with less.
_MOST_TRIES = 4
#: Only so many of the dearest pins.
_MOST_SWAPS = 32


class Tried(Protocol):
    """What a search can tell."""

    worth: Worth
    target: float

    def error(self, pinned: Names) -> float:
        """The error of a real run with these pins."""

    def is_known(self, pinned: Names) -> bool:
        """Whether these pins were run already."""

    def runs_left(self) -> bool:
        """Whether one more run is allowed."""


def make_cheaper(search: Tried, pinned: Names, start: Names) -> Names:
    """Try what costs less and should still meet the target, the largest saving first.

    Args:
        search: asked for real runs.
        pinned: a set that meets the target.
        start: what must be pinned.

    Returns:
        A set that meets it too, and costs no more.
    """
    worth = search.worth
    for _ in range(_MOST_TRIES):
        slack = search.target**2 - search.error(pinned) ** 2
        slack *= worth.total / worth.base**2
        tries = (
            (saved, pinned - {name} | set(instead))
            for saved, lost, name, instead in _options(worth, pinned, start)
            if lost <= slack and saved > 0
        )
        tries = ((saved, other) for saved, other in tries if not search.is_known(other))
        _, other = max(tries, key=lambda found: found[0], default=(0.0, start))
        if other == start or not search.runs_left():
            break
        if search.error(other) <= search.target:
            pinned = other
    return pinned


def _options(
    worth: Worth, pinned: Names, start: Names
) -> Iterator[tuple[float, float, str, list[str]]]:
    """The price that is saved, the gain lost, which pin to leave out, what to pin instead."""
    by_name = {c.name: c for c in worth.candidates}
    useful = [c for c in worth.candidates if worth.gain(c) > NOTHING * worth.total]
    useful = [c for c in useful if c.name not in pinned and not worth.overlaps(c, pinned)]
    dearest = sorted(pinned - start, key=lambda name: (-by_name[name].price, name))
    for name in dearest[:_MOST_SWAPS]:
        one = by_name[name]
        yield one.price, worth.gain(one), name, []
        for other in useful:
            # Two estimates may both be wrong.
            lost = 1.2 * worth.gain(one) - 0.8 * worth.gain(other)
            yield one.price - other.price, lost, name, [other.name]
        # Parts pinned together gain more than one by one: float32 goes from one to the other.
        # So their part in the whole is told by their shares.
        parts = [by_name[part] for part in worth.inside[name] if not worth.inside[part]]
        parts.sort(key=lambda c: c.low / max(c.price, 1e-12), reverse=True)
        shares = sum(c.low for c in parts)
        for n in range(1, len(parts) + 1 if shares else 0):
            price, share = sum(c.price for c in parts[:n]), sum(c.low for c in parts[:n])
            lost = worth.gain(one) * (1 - share / shares)
            yield one.price - price, lost, name, [c.name for c in parts[:n]]
