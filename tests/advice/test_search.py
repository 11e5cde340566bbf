"""The purchase, and what it takes."""

import math

import pytest
import torch
from advised import relative_error, smooth, transformer
from torch import nn

import dtypepin
from dtypepin._advice.candidates import Candidate
from dtypepin._advice.runs import Runs
from dtypepin._advice.search import Search
from dtypepin._advice.worth import Worth
from dtypepin._base.selection import named


@pytest.mark.parametrize("model_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("tolerance", [0.9, 0.5, 0.2])
def test_the_cost_is_bounded(tolerance, model_dtype):
    model = transformer(depth=12)
    plan = dtypepin.suggest(model, smooth(32, 16), tolerance=tolerance, model_dtype=model_dtype)
    assert plan.forward_equivalents <= 16
    assert plan.runs <= 8
    if model_dtype is None:
        assert plan.reached
        assert plan.error_measured >= 0.8 * plan.target  # it does not buy more than was asked for


def test_the_search_stops_within_eight_percent_of_the_squared_target():
    asked = []

    class Known(Runs):
        """Every pin takes 0.01 of the squared error; the shares say half of that."""

        def error(self, pinned, output):
            asked.append(len(pinned))
            return math.sqrt(max(1 - 0.01 * len(pinned), 0))

    names = [str(n) for n in range(150)]
    model = nn.ModuleDict({name: nn.Identity() for name in names})
    worth = Worth([Candidate(m, low=0.005) for m in named(model)[1:]])
    search = Search(Known(None, [], None, None), worth, True, 7, [])
    search.target = math.sqrt(0.5)
    found = search.shortest([frozenset(names[:n]) for n in range(150)])
    assert 50 <= len(found) <= 54
    assert len(set(asked) - {0}) <= 3  # the prediction, and corrections


@pytest.mark.parametrize(("probes", "most"), [(2, 16), (12, 21)])
def test_the_search_stops_where_it_gets_dear(monkeypatch, probes, most):
    def one_less(self, order, fails, meets, halve):
        return meets - 1  # a search that would take as many runs as there are modules

    monkeypatch.setattr(Search, "_next", one_less)
    plan = dtypepin.suggest(transformer(24), smooth(32, 16), probes=probes, max_runs=40)
    assert plan.reached
    assert most - 1 < plan.forward_equivalents <= most  # at least three runs


def test_without_gradients_groups_are_left_out_run_by_run():
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = transformer(depth=12, loud=5)

        @torch.no_grad()
        def forward(self, x):
            return self.body(x)

    model, x = Frozen(), smooth(32, 16)
    plan = dtypepin.suggest(model, x)
    assert plan.reached
    assert {"body.5"} <= set(plan.names)
    assert len(plan.names) <= 4
    assert plan.error_measured == pytest.approx(relative_error(model, x, **plan.pin_arguments()))
    assert "no gradient" in plan.notes[0]


def test_a_target_that_cannot_be_reached_gets_the_best_and_says_so():
    plan = dtypepin.suggest(transformer(), smooth(32, 16), tolerance=0.01, candidates="up$")
    assert not plan.reached
    assert plan.error_measured < plan.error_before
    assert "was not reached" in plan.notes[-1]
    assert "(not reached)" in str(plan)


def test_an_overflow_that_no_candidate_makes_is_not_called_reached():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.out = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            x = self.lin(x) @ (1e6 * torch.eye(16))  # no float16
            return self.out(1e-6 * x.float())

    plan = dtypepin.suggest(Root(), smooth(32, 16), autocast_dtype="float16")
    assert math.isinf(plan.error_before)
    assert not plan.reached
    assert "not finite in low precision" in plan.notes[-1]
