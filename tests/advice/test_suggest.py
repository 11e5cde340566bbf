"""Which modules to pin: shares, prices, real runs, and a model that is as before."""

import copy
import functools
import json
import math
import random
import sys

import pytest
import torch
from torch import nn

import dtypepin
from dtypepin import PinError, PinWarning
from dtypepin._advice import cheaper
from dtypepin._advice.candidates import Candidate
from dtypepin._advice.plan import Plan, PlanRow
from dtypepin._advice.runs import Runs
from dtypepin._advice.search import Search
from dtypepin._advice.worth import Worth
from dtypepin._base.selection import named

BF16, F16, F32 = torch.bfloat16, torch.half, torch.float32


def smooth(*shape):
    """Inputs that do not look like noise."""
    return torch.sin(torch.arange(math.prod(shape), dtype=F32) * 0.37).reshape(shape)


class Block(nn.Module):
    """A residual block: restoring its inner outputs does not feed float32 to the next one."""

    def __init__(self, width=16):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def transformer(depth=4, loud=None):
    """Blocks; the ``loud`` one shouts down the others."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(depth)))
    if loud is not None:
        with torch.no_grad():
            model[loud].down.weight.mul_(20)
    return model


def relative_error(model, x, **pins):
    with torch.no_grad():
        reference = model(x)
        with torch.autocast("cpu", BF16):
            if not pins:
                out = model(x)
            else:
                with dtypepin.pin_dtype(model, **pins):
                    out = model(x)
    return float((out.float() - reference).norm() / reference.norm())


# What it finds.


def test_the_plan_holds_what_it_says():
    model, x = transformer(), smooth(32, 16)
    plan = dtypepin.suggest(model, x)
    assert plan.reached
    assert plan.error_before == pytest.approx(relative_error(model, x))
    assert plan.error_measured == pytest.approx(relative_error(model, x, **plan.pin_arguments()))
    assert plan.error_measured <= plan.target == pytest.approx(0.5 * plan.error_before)
    assert plan.error_predicted == pytest.approx(plan.error_measured, rel=0.5)
    assert plan.forward_equivalents <= 16


@pytest.mark.parametrize("loud", [0, 2, 3])
def test_a_loud_module_is_found(loud):
    model = transformer(loud=loud)
    plan = dtypepin.suggest(model, smooth(32, 16), tolerance=0.75)
    assert plan.names
    assert {name.partition(".")[0] for name in plan.names} == {str(loud)}


def test_shares_are_what_one_at_a_time_runs_say():
    class Residual(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.norm, self.lin = nn.LayerNorm(16), nn.Linear(16, 16)
            with torch.no_grad():
                self.lin.weight.mul_(size)

        def forward(self, x):
            return x + self.lin(self.norm(x))

    torch.manual_seed(0)
    model, x = nn.Sequential(*(Residual(size) for size in (1, 3, 0.3, 2))), smooth(64, 16)
    plan = dtypepin.suggest(model, x, probes=32, candidates="lin", max_runs=1)
    shares = {row.name: row.gain for row in plan.rows}
    before = relative_error(model, x) ** 2
    for name, share in shares.items():
        real = (before - relative_error(model, x, patterns=f"^{name}$") ** 2) / before
        assert share == pytest.approx(real, rel=0.25, abs=0.02)
    assert sum(shares.values()) == pytest.approx(1, rel=0.1)


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


@pytest.mark.parametrize(("probes", "most"), [(2, 16), (12, 21)])
def test_the_search_stops_where_it_gets_dear(monkeypatch, probes, most):
    def one_less(self, order, fails, meets, halve):
        return meets - 1  # a search that would take as many runs as there are modules

    monkeypatch.setattr(Search, "_next", one_less)
    plan = dtypepin.suggest(transformer(24), smooth(32, 16), probes=probes, max_runs=40)
    assert plan.reached
    assert most - 1 < plan.forward_equivalents <= most  # at least three runs


def test_dropout_makes_no_noise():
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(), nn.Linear(16, 16)).train()
    plan = dtypepin.suggest(model, smooth(32, 16))
    assert plan.error_before == pytest.approx(relative_error(model.eval(), smooth(32, 16)))


def test_the_last_module_gains_what_is_kept():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    rows = {row.name: row for row in dtypepin.suggest(model, smooth(32, 16), tolerance=0.9).rows}
    assert rows["1"].gain_keep > rows["1"].gain  # nothing comes after it


def test_norms_under_autocast_are_useless():
    plan = dtypepin.suggest(transformer(), smooth(32, 16))
    norms = [row for row in plan.rows if row.class_name == "LayerNorm"]
    assert len(norms) == 4
    assert not any(row.pinned for row in norms)
    assert all(row.remark.startswith(("useless", "harmful")) for row in norms)


def test_a_pin_that_loses_is_named_and_keep_is_offered():
    class Output(nn.Module):
        """Ends in a norm, which gives float32 out under autocast, and adds little error itself."""

        def __init__(self):
            super().__init__()
            self.lin, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

        def forward(self, x):
            return self.norm(x.float() + 0.1 * self.lin(x))

    model = nn.Sequential(nn.Linear(16, 16), Output())
    plan = dtypepin.suggest(model, smooth(32, 16), candidates="^1$", tolerance=0.999)
    (row,) = plan.rows
    assert row.remark == "harmful: its output is wider without a pin"
    assert row.gain < 0 < row.gain_keep
    assert plan.output == "keep"
    assert plan.reached
    assert plan.error_measured == pytest.approx(
        relative_error(model, smooth(32, 16), **plan.pin_arguments())
    )


def test_what_overflows_must_be_pinned():
    model = transformer()
    model.insert(2, nn.Linear(16, 16, bias=False))
    nn.init.constant_(model[2].weight, 20000.0)
    model.insert(3, nn.LayerNorm(16))
    model.insert(2, nn.Linear(16, 16))  # hands float16 on
    plan = dtypepin.suggest(model, smooth(32, 16).cumsum(1), autocast_dtype="float16")
    (must,) = [row for row in plan.rows if row.remark.startswith("must")]
    assert (must.name, must.pinned) == ("3", True)
    assert math.isinf(plan.error_before)
    assert math.isfinite(plan.error_measured)
    assert plan.output == "keep"  # cast back to float16 it would overflow again
    assert 'output="keep"' in plan.notes[0]


def test_a_container_with_matmuls_of_its_own_is_a_candidate_and_holds_no_other_pin():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            return self.out((q @ k.transpose(-1, -2) * 4).softmax(-1) @ v)

    torch.manual_seed(0)
    model = nn.Sequential(Attention(), Attention())
    # By FLOPs, "1.out" is bought first and "1" takes its place; by number, "1" comes first.
    for price, tolerance, names in (
        ("flops", 0.9, {"1.out"}),
        ("flops", 0.5, {"1"}),
        ("fewest", 0.02, {"0", "1"}),
    ):
        plan = dtypepin.suggest(model, smooth(16, 8, 16), tolerance=tolerance, price=price)
        assert {row.name for row in plan.rows} >= {"0", "0.qkv", "0.out", "1"}
        assert set(plan.names) == names
        assert plan.reached


def test_a_model_that_is_cast_as_a_whole():
    model, x = transformer(loud=1), smooth(32, 16)
    plan = dtypepin.suggest(model, x, model_dtype="bfloat16", tolerance=0.9)
    low = copy.deepcopy(model).to(BF16)
    with torch.no_grad():
        reference = model(x)
        before = low(x.to(BF16))
        with dtypepin.pin_dtype(low, **plan.pin_arguments()):
            after = low(x.to(BF16))
    norm = reference.norm()
    assert plan.error_before == pytest.approx(float((before.float() - reference).norm() / norm))
    assert plan.error_measured == pytest.approx(float((after.float() - reference).norm() / norm))
    assert plan.error_measured < plan.error_before
    assert plan.output == "restore"
    assert model[0].up.weight.dtype is F32


@pytest.mark.parametrize("wrap", [list, tuple, iter])
def test_several_batches(wrap):
    model, x = transformer(), smooth(32, 16)
    whole = dtypepin.suggest(model, x)
    given = [x[:16], x[16:]] if wrap is not tuple else [(x[:16],), {"input": x[16:]}]
    parts = dtypepin.suggest(model, given if wrap is tuple else wrap(given))
    assert parts.error_before == pytest.approx(whole.error_before)
    assert parts.reached
    prices = [{row.name: row.price for row in plan.rows} for plan in (whole, parts)]
    assert 2 * prices[1]["0.up"] == pytest.approx(prices[0]["0.up"])  # of a batch


def test_outputs_of_any_nesting_and_a_metric():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = transformer()

        def forward(self, x, ids):
            y = self.body(x)
            return {"y": [y], "ids": ids, "pooled": (y.mean(1), None)}

    seen = []

    def metric(reference, candidate):
        seen.append([tuple(t.shape) for t in reference])
        assert all(t.dtype is F32 for t in candidate)
        return max(float((a - b).abs().max()) for a, b in zip(reference, candidate, strict=True))

    model, x = Nested(), smooth(32, 16)
    ids = torch.arange(3)
    plan = dtypepin.suggest(model, {"x": x, "ids": ids}, metric=metric, tolerance=0.6)
    assert seen[0] == [(32, 16), (32,)]
    assert plan.reached
    with torch.no_grad():
        exact = model(x, ids)
        with torch.autocast("cpu", BF16):
            low = model(x, ids)
    worst = max(
        float((low["y"][0] - exact["y"][0]).abs().max()),
        float((low["pooled"][0] - exact["pooled"][0]).abs().max()),
    )
    assert plan.error_before == pytest.approx(worst)


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


def test_nothing_to_do():
    plan = dtypepin.suggest(transformer(), smooth(32, 16), absolute_tolerance=1.0)
    assert plan.reached
    assert plan.names == []
    with pytest.raises(PinError, match="the plan pins nothing"):
        plan.pin_arguments()


def test_held_out_inputs():
    model, x = transformer(), smooth(64, 16)
    plan = dtypepin.suggest(model, x[:32], holdout=[x[32:48], x[48:]])
    before, after = plan.error_held_out
    assert before == pytest.approx(relative_error(model, x[32:]))
    assert after == pytest.approx(relative_error(model, x[32:], **plan.pin_arguments()))
    assert f"{after:.2e} with these pins" in str(plan)


@pytest.mark.parametrize("price", ["flops", "ms", "bytes", "fewest"])
def test_prices(price):
    plan = dtypepin.suggest(transformer(), smooth(32, 16), price=price)
    row = {row.name: row for row in plan.rows}["0.up"]
    expected = {
        "flops": 2 * 32 * 16 * 64,
        "ms": row.price,
        "bytes": 2 * (16 * 64 + 64 + 32 * 64),
        "fewest": 1,
    }
    assert row.price == expected[price] > 0
    assert plan.reached


def test_candidates_by_pattern_class_and_predicate():
    model, x = transformer(), smooth(32, 16)
    names = [f"{i}.up" for i in range(4)]
    by_pattern = dtypepin.suggest(model, x, candidates=r"\.up$", tolerance=0.9)
    by_predicate = dtypepin.suggest(model, x, candidates=lambda n, _: n[2:] == "up", tolerance=0.9)
    by_class = dtypepin.suggest(model, x, class_candidates="Linear", tolerance=0.9)
    assert sorted(row.name for row in by_pattern.rows) == names
    assert sorted(row.name for row in by_predicate.rows) == names
    assert {row.class_name for row in by_class.rows} == {"Linear"}


def test_a_seed_gives_the_same_plan():
    model, x = transformer(), smooth(32, 16)
    plans = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed + len(plans))
        plans.append(dtypepin.suggest(model, x, seed=seed))
    assert str(plans[0]) == str(plans[1])
    assert [row.share for row in plans[0].rows] != [row.share for row in plans[2].rows]


# The model is as before.


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.norm, self.drop = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout()
        self.last = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(()))
        self.fail = None
        self.ran = []

    def forward(self, x):
        self.calls += 1 + 0 * torch.rand(())
        self.ran.append(1)
        if self.fail is not None and torch.is_autocast_enabled("cpu") and len(self.ran) > 2:
            raise self.fail
        return self.last(self.drop(self.norm(torch.relu(self.lin(x)))))


def picture(model):
    return (
        [part.training for part in model.modules()],
        [(value.requires_grad, value.grad) for value in model.parameters()],
        [
            (id(value), value.dtype, value.tolist())
            for value in model.state_dict(keep_vars=True).values()
        ],
        [(list(part.__dict__), len(part._forward_hooks)) for part in model.modules()],
        [type(part._parameters) for part in model.modules()],
        torch.get_rng_state().tolist(),
        random.getstate(),
        torch.is_autocast_enabled("cpu"),
        torch.is_grad_enabled(),
    )


@pytest.mark.parametrize("fail", [None, ValueError("no"), KeyboardInterrupt()])
def test_nothing_is_changed(fail):
    model = Stateful()
    model.drop.eval()
    model.lin.bias.requires_grad_(False)
    model(smooth(32, 16)).sum().backward()
    grads = [value.grad for value in model.parameters()]
    x = smooth(32, 16)
    before = picture(model)
    model.fail = fail
    if fail is None:
        plan = dtypepin.suggest(model, x, tolerance=0.7)
        assert plan.reached
    else:
        with pytest.raises(type(fail)):
            dtypepin.suggest(model, x)
    model.fail = None
    assert picture(model)[2:] == before[2:]
    assert picture(model)[0] == before[0]
    assert [value.grad for value in model.parameters()] == grads
    assert not model.lin.bias.requires_grad
    assert model.lin.weight.requires_grad
    assert torch.equal(x, smooth(32, 16))


def test_in_place_modules_do_not_write_into_the_inputs():
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(16, 16), nn.ReLU(inplace=True))
    x = smooth(32, 16)
    dtypepin.suggest(model, x, tolerance=0.9, absolute_tolerance=1e-9)
    assert torch.equal(x, smooth(32, 16))


class Restless(nn.Module):
    """Changes itself in every way that a forward can."""

    def __init__(self):
        super().__init__()
        self.lin, self.out = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("result", torch.zeros(32, 16))
        self.cache = None

    def forward(self, x, ids):
        self.steps = self.steps + 1  # another buffer
        if self.cache is None:
            self.cache = self.lin.weight.detach().to(torch.get_autocast_dtype("cpu"))
            self.late = nn.Linear(1, 1)
        ids.add_(1)
        noise = 0.1 * torch.randn(32, 16)
        self.result.copy_(self.out(torch.tanh(self.lin(x)) + noise) * ids[:, None] * self.steps)
        return self.result


def test_every_run_begins_the_same_and_the_model_stays_what_it_was():
    model, x, ids = Restless(), smooth(32, 16), torch.arange(32)
    steps = model.steps

    def errors(pins):
        outs = []
        for low in (False, True):
            model.steps, model.cache = steps.clone(), None
            torch.manual_seed(0)
            with torch.no_grad(), torch.autocast("cpu", BF16, enabled=low):
                if low and pins:
                    with dtypepin.pin_dtype(model, **pins):
                        outs.append(model(x, ids.clone()).clone())
                else:
                    outs.append(model(x, ids.clone()).clone())
        return float((outs[1] - outs[0]).norm() / outs[0].norm())

    before = errors({})
    model.steps, model.cache = steps, None
    del model.late
    model.result.zero_()
    attributes = [list(vars(part)) for part in model.modules()]
    torch.manual_seed(5)
    plan = dtypepin.suggest(model, (x, ids), tolerance=0.8)
    after = torch.rand(3)
    assert plan.error_before == pytest.approx(before)
    assert torch.equal(ids, torch.arange(32))
    assert model.steps is steps
    assert steps == 0
    assert model.cache is None
    assert not model.result.any()
    assert not model.result.requires_grad
    assert attributes == [list(vars(part)) for part in model.modules()]
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3))
    assert plan.error_measured == pytest.approx(errors(plan.pin_arguments()))


def test_random_numbers_are_the_same_in_every_run_and_set_by_the_seed():
    class Sampling(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean, self.out = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            mean = self.mean(x)
            # Not ``randn_like``: torch 2.4 draws other numbers for another dtype.
            return self.out(mean + torch.randn(mean.shape))

    torch.manual_seed(0)
    model, x = Sampling(), smooth(32, 16)
    plans = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        plans.append(dtypepin.suggest(model, x))
    assert plans[0].error_before < 0.01
    assert str(plans[0]) == str(plans[1])


def test_a_buffer_that_a_candidate_gives_out_stays_without_gradient():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", smooth(16, 16))
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self):
            return self.table

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.lin = Table(), nn.Linear(16, 16)

        def forward(self, x):
            return self.lin(x @ self.table())

    model = Net()
    dtypepin.suggest(model, smooth(32, 16))
    assert not model.table.table.requires_grad


def test_parameters_that_a_forward_writes_to_are_named():
    class Writing(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.bias.mul_(0.5)
            return super().forward(x)

    with pytest.warns(PinWarning, match=r"not undone: 1\.bias"):
        dtypepin.suggest(nn.Sequential(nn.Linear(16, 16), Writing(16, 16)), smooth(32, 16))


def test_hooks_of_the_user_count_once():
    def louder(module, args):
        return (args[0] * 8,)

    class Louder(nn.Linear):
        def forward(self, x):
            return super().forward(x * 8)

    torch.manual_seed(0)
    weights = [nn.Linear(16, 16) for _ in range(2)]
    inside = nn.Sequential(weights[0], nn.Tanh(), Louder(16, 16))
    inside[2].load_state_dict(weights[1].state_dict())
    plan = dtypepin.suggest(inside, smooth(32, 16))
    hooked = nn.Sequential(weights[0], nn.Tanh(), weights[1])
    hooked[2].register_forward_pre_hook(louder)
    other = dtypepin.suggest(hooked, smooth(32, 16))
    shares = [{row.name: row.share for row in found.rows} for found in (plan, other)]
    assert shares[0]["0"] == pytest.approx(shares[1]["0"], rel=0.02)
    assert shares[0]["2"] == pytest.approx(shares[1]["2"], rel=0.02)


def test_batches_may_differ_in_size():
    model, x = transformer(), smooth(66, 16)
    sums = []
    for batches in (x, [x[:64], x[64:]], [x[:2], x[2:]]):
        rows = dtypepin.suggest(model, batches, probes=8).rows
        sums.append(sum(row.share for row in rows))
    assert sums[1] == pytest.approx(sums[0], rel=0.1)
    assert sums[2] == pytest.approx(sums[0], rel=0.1)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_models(reentrant):
    from torch.utils.checkpoint import checkpoint

    class Saving(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = transformer(loud=2)

        def forward(self, x):
            for block in self.body:
                x = checkpoint(block, x, use_reentrant=reentrant) if self.saves else x
                x = x if self.saves else block(x)
            return x

    model = Saving()
    shares = []
    for model.saves in (False, True):
        plan = dtypepin.suggest(model, smooth(32, 16), tolerance=0.7)
        assert plan.reached
        shares.append({row.name: row.share for row in plan.rows})
    if reentrant:  # it knows no ``autograd.grad``
        assert plan.notes[0].startswith("the output has no gradient")
    else:
        assert shares[0] == pytest.approx(shares[1])


def test_a_compiled_model_is_looked_at_as_it_was_written():
    model, x = transformer(), smooth(32, 16)
    plan = dtypepin.suggest(torch.compile(model, backend="eager"), x)
    assert str(plan) == str(dtypepin.suggest(model, x))
    compiled = transformer()
    compiled[0].compile(backend="eager")
    if hasattr(torch.compiler, "set_stance"):
        assert str(dtypepin.suggest(compiled, x)) == str(plan)
    else:
        with pytest.raises(PinError, match="cannot run eagerly"):
            dtypepin.suggest(compiled, x)


def test_the_same_output_twice_and_complex_ones():
    class Spectrum(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(16, 16)

        def forward(self, x):
            h = self.lin(x)
            return {"h": h, "h32": h.float(), "spectrum": torch.fft.rfft(h.float())}

    model, x = Spectrum(), smooth(32, 16)
    plan = dtypepin.suggest(model, x)
    with torch.no_grad():
        exact = model(x)
        with torch.autocast("cpu", BF16):
            low = model(x)
    wrong = sum(float((low[k] - exact[k]).abs().pow(2).sum()) for k in exact)
    right = sum(float(exact[k].abs().pow(2).sum()) for k in exact)
    assert plan.error_before == pytest.approx(math.sqrt(wrong / right))


def test_infinities_on_both_sides_are_no_error():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = transformer()

        def forward(self, x):
            return self.body(x).masked_fill(torch.eye(32, 16) > 0, -math.inf)

    plan = dtypepin.suggest(Masked(), smooth(32, 16))
    assert math.isfinite(plan.error_before)
    assert plan.reached
    assert 0 < plan.error_measured <= plan.target


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


def test_keep_is_measured_as_keep():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16, bias=False), nn.LayerNorm(16))
    nn.init.constant_(model[1].weight, 20000.0)
    model.append(nn.Linear(16, 16))
    x = smooth(32, 16).cumsum(1)
    plan = dtypepin.suggest(model, x, autocast_dtype="float16", tolerance=0.9)
    with torch.no_grad():
        reference = model(x)
        with dtypepin.pin_dtype(model, **plan.pin_arguments()), torch.autocast("cpu", F16):
            out = model(x)
    assert plan.error_measured == pytest.approx(
        float((out.float() - reference).norm() / reference.norm())
    )


# What is refused, and warned of.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"price": "euros"}, "price: got 'euros'"),
        ({"autocast_dtype": "float32"}, "got float32 as low precision"),
        ({"autocast_dtype": "bf16", "model_dtype": "bf16"}, "expected one of them"),
        ({"model_dtype": "int8"}, "model_dtype: got 'int8'"),
        ({"tolerance": 1.5}, r"tolerance: got 1\.5"),
        ({"inputs": 3}, "inputs: got int"),
        ({"inputs": "x"}, "inputs: got str"),
        ({"inputs": []}, "inputs: got no batch"),
        ({"candidates": "nothing"}, "no module matched"),
        ({"candidates": "^$"}, "candidates: got no module"),
    ],
)
def test_arguments_that_are_wrong(arguments, message):
    with pytest.raises(PinError, match=message):
        dtypepin.suggest(transformer(), **{"inputs": smooth(32, 16), **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"probes": -3}, "probes: got -3, expected a number above 0"),
        ({"probes": True}, "probes: got True"),
        ({"tolerance": "half"}, "tolerance: got 'half', expected a number between 0 and 1"),
        ({"absolute_tolerance": -1}, "absolute_tolerance: got -1"),
        ({"absolute_tolerance": math.nan}, "absolute_tolerance: got nan"),
        ({"max_runs": 0}, "max_runs: got 0"),
        ({"seed": "a"}, "seed: got 'a'"),
        ({"candidates": lambda n, m: True, "class_candidates": "x"}, "beside a predicate"),
        ({"inputs": torch.zeros(0, 16)}, "got a batch without samples"),
        ({"inputs": torch.full((32, 16), math.nan)}, "got nan as the float32 output"),
        ({"holdout": 5}, "holdout: got int"),
        ({"inputs": [[smooth(32, 16), torch.ones(32)]]}, "[x for x, _ in loader]"),
        ({"inputs": (smooth(32, 16), torch.ones(32))}, "forward of Sequential does not take"),
        ({"holdout": {"x": smooth(32, 16)}}, "holdout: got a batch that forward of Sequential"),
        ({"metric": lambda a, b: -1.0}, "metric: got -1.0, expected a number of 0 or more"),
        ({"model": 5}, "model: got int, expected a torch.nn.Module"),
        ({"model": transformer().bfloat16()}, "got '0.norm.weight' in bfloat16, expected a float"),
        ({"model": nn.LazyLinear(4)}, "not initialised yet"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    given = {"model": transformer(), "inputs": smooth(32, 16), **arguments}
    with pytest.raises(PinError) as caught:
        dtypepin.suggest(given.pop("model"), given.pop("inputs"), **given)
    assert message in str(caught.value)


def test_forwards_that_are_handed_more_than_is_given():
    def adds(forward):
        @functools.wraps(forward)
        def wrapper(self, x):
            return forward(self, x, 1.0)

        return wrapper

    class Decorated(nn.Sequential):
        @adds
        def forward(self, x, scale):
            return super().forward(x) * scale

    class Called(nn.Sequential):
        def __call__(self, x, label):
            return super().__call__(x)

    x = smooth(32, 16)
    assert dtypepin.suggest(Decorated(*transformer()), x).reached
    assert dtypepin.suggest(Called(*transformer()), (x, 1)).reached
    model = transformer()
    model.register_forward_pre_hook(lambda module, args: args[:1])
    assert dtypepin.suggest(model, (x, 1)).reached


def test_a_metric_without_a_number_is_a_failure():
    plan = dtypepin.suggest(transformer(), smooth(32, 16), metric=lambda a, b: math.nan)
    assert not plan.reached


def test_a_model_with_pins_is_refused():
    model = transformer()
    with (
        dtypepin.pin_dtype(model, "0.up", dtype="bfloat16"),
        pytest.raises(PinError, match=r"got '0\.up' pinned already"),
    ):
        dtypepin.suggest(model, smooth(32, 16))


def test_an_output_without_floats_is_refused():
    class Classes(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(16, 16)

        def forward(self, x):
            return self.lin(x).argmax(-1)

    with pytest.raises(PinError, match="got an output without floating tensors"):
        dtypepin.suggest(Classes(), smooth(32, 16))


def test_few_samples_and_noise_are_warned_of():
    model = transformer()
    with pytest.warns(PinWarning, match="samples times probes are 12"):
        dtypepin.suggest(model, smooth(2, 16))
    with pytest.warns(PinWarning, match="look like random noise") as caught:
        dtypepin.suggest(model, torch.randn(64, 16))
    assert caught[0].filename == __file__


def test_progress(capsys, monkeypatch):
    lines = []
    dtypepin.suggest(transformer(), smooth(32, 16), progress=lines.append)
    assert lines[0] == "one run in low precision"
    assert any(line.startswith("run with") for line in lines)
    dtypepin.suggest(transformer(), smooth(32, 16))
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    dtypepin.suggest(transformer(), smooth(32, 16))
    assert "dtypepin.suggest: one run in low precision" in capsys.readouterr().err


def test_what_cannot_be_pinned_is_left_out():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[1] = torch.jit.script(model[1])
    plan = dtypepin.suggest(model, smooth(32, 16), candidates="[01]", tolerance=0.9)
    assert [row.name for row in plan.rows] == ["0"]
    assert "cannot be pinned: 1" in plan.notes[0]


# Plans.


def test_a_plan_saved_and_loaded(tmp_path):
    model, x = transformer(), smooth(32, 16)
    plan = dtypepin.suggest(model, x, holdout=x)
    plan.save(tmp_path / "plan.json")
    loaded = dtypepin.load_plan(tmp_path / "plan.json", model)
    assert loaded == plan
    assert loaded.pin_arguments() == plan.pin_arguments()
    other = nn.Linear(16, 16)
    with pytest.raises(PinError, match=r"does not fit Linear: got no module at '.*', expected"):
        dtypepin.load_plan(tmp_path / "plan.json", other)
    model[int(plan.names[0][0])] = nn.Identity()
    with pytest.raises(PinError, match=r"got (Identity|no module) at '.*', expected "):
        dtypepin.load_plan(tmp_path / "plan.json", model)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.pop("rows"),
        lambda data: data.update(dtypepin_plan=99),
        lambda data: data.update(more=1),
        lambda data: data.update(output="drop"),
        lambda data: data.update(target="low"),
        lambda data: data["rows"][0].update(pinned="yes"),
        lambda data: data["rows"][0].pop("name"),
        lambda data: data.update(error_held_out=[1.0]),
        lambda data: data.update(error_held_out=[1.0, "b"]),
        lambda data: data.update(notes=None),
        lambda data: data.update(notes=[1]),
        lambda data: data.update(unit="apples"),
        lambda data: data.update(reached="no"),
        lambda data: data.update(runs=True),
        lambda data: data.update(forward_equivalents="many"),
        lambda data: data.update(target=math.nan),
        lambda data: data["rows"][0].update(remark=None),
        lambda data: data["rows"][0].update(price="1"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(damage, tmp_path):
    path = tmp_path / "plan.json"
    row = PlanRow("a", "Linear", pinned=True, share=1.0, gain=1.0, gain_keep=1.0, price=1.0)
    Plan([row], "restore", "flops", 1.0, 0.5, 0.1, 0.1, None, True, 1, 1.0).save(path)
    assert dtypepin.load_plan(path).names == ["a"]
    data = json.loads(path.read_text())
    damage(data)
    path.write_text(json.dumps(data))
    with pytest.raises(PinError, match=r"plan\.json: got .*, expected a file of Plan\.save"):
        dtypepin.load_plan(path)
    path.write_text("{")
    with pytest.raises(PinError, match=r"expected a file of Plan\.save"):
        dtypepin.load_plan(path)


def test_the_printed_plan(golden):
    rows = [
        PlanRow("a.fc", "Linear", True, 0.5, 0.4, 0.45, 2.5e6),
        PlanRow("a.norm", "LayerNorm", False, 0.0, 0.0, 0.0, 100.0, "useless"),
        *(PlanRow(f"b.{i}", "Linear", False, 0.01, -0.01, 0.01, 1e3) for i in range(11)),
    ]
    plan = Plan(
        rows, "restore", "flops", 6e-3, 3e-3, 2.9e-3, 2.8e-3, (7e-3, 3.1e-3), True, 5, 12.5, ["so"]
    )
    golden("plan.txt", str(plan))
