"""A plan that meets the target is made cheaper."""

import math

import pytest
from advised import smooth, transformer
from torch import nn

import dtypepin
from dtypepin._advice import cheaper
from dtypepin._advice.candidates import Candidate
from dtypepin._advice.worth import Worth
from dtypepin._base.selection import named


def test_what_is_not_needed_is_given_back(monkeypatch):
    def price(tolerance):
        plan = dtypepin.suggest(transformer(depth=12), smooth(32, 16), tolerance=tolerance)
        assert plan.reached
        return sum(row.price for row in plan.rows if row.pinned)

    tolerances = [0.95, 0.9, 0.85, 0.8, 0.7, 0.6]
    prices = [price(tolerance) for tolerance in tolerances]
    monkeypatch.setattr(cheaper, "make_cheaper", lambda search, best, start: best)
    without = [price(tolerance) for tolerance in tolerances]
    assert all(a <= b for a, b in zip(prices, without, strict=True))
    assert any(a < b for a, b in zip(prices, without, strict=True))


DROP = {"small": (0.30, 1), "dear": (0.15, 9)}


SWAP = {"big": (0.60, 9), "cheap": (0.55, 4), "poor": (0.10, 1)}


PARTS = {"block": (0.40, 30), "block.up": (0.05, 5), "block.down": (0.05, 5), "block.norm": (0, 9)}


INSIDE = {"block": (0.2, 6), "dear": (0.2, 5), "block.up": (0.25, 4), "block.down": (0.6, 7)}


NEEDED = {"big": (0.35, 9), "needed": (0.01, 8), "dear": (0.01, 4)}


@pytest.mark.parametrize(
    ("gains", "bought", "left"),
    [
        (DROP, {"small", "dear"}, {"small"}),
        (DROP, {"small"}, {"small"}),
        (SWAP, {"big"}, {"cheap"}),
        (PARTS, {"block"}, {"block.up", "block.down"}),
        (INSIDE, {"block", "dear"}, {"block", "dear"}),  # not a part beside the whole
        (NEEDED, {"big", "needed", "dear"}, {"big", "needed"}),  # more than its share says
    ],
)
def test_what_meets_the_target_is_made_cheaper(gains, bought, left):
    model = nn.ModuleDict({name: nn.Identity() for name in gains if "." not in name})
    model["block"] = nn.ModuleDict({"up": nn.Tanh(), "down": nn.ReLU(), "norm": nn.Identity()})

    asked = []

    named_so = {found.names[0]: found for found in named(model)}
    candidates = [
        Candidate(named_so[name], low=gain, price=price) for name, (gain, price) in gains.items()
    ]

    class Known:
        target = math.sqrt(0.7)
        worth = Worth(candidates)

        def error(self, pinned):
            gain = sum(gains[name][0] for name in pinned)
            # Together they gain more: float32 goes from one to the other.
            if {"block.up", "block.down"} <= pinned:
                gain += 0.3
            if "needed" in gains and "needed" not in pinned:
                gain -= 0.2
            asked.append(pinned)
            return math.sqrt(1 - gain)

        def is_known(self, pinned):
            return pinned in asked

        def runs_left(self):
            return True

    assert cheaper.make_cheaper(Known(), frozenset(bought), frozenset()) == left
    tried = [pinned for pinned in asked if pinned not in (bought, left)]
    assert len(tried) == len(set(tried))
