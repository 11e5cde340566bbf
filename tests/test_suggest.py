"""Which modules to pin: shares, prices, real runs, and a model that is as before."""

import copy
import json
import math
import random

import pytest
import torch
from torch import nn

import dtypepin
from dtypepin import PinError, PinWarning, _suggest
from dtypepin._plan import Plan, PlanRow
from dtypepin._select import named
from dtypepin._shares import Candidate

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
    monkeypatch.setattr(
        _suggest._Search, "_make_cheaper", lambda self, best, *_: setattr(self, "best", best)
    )
    without = [price(tolerance) for tolerance in tolerances]
    assert all(a <= b for a, b in zip(prices, without, strict=True))
    assert any(a < b for a, b in zip(prices, without, strict=True))


def test_the_search_stops_within_eight_percent_of_the_squared_target():
    class Known(_suggest._Search):
        """Every pin takes 0.01 of the squared error; the shares say half of that."""

        def __init__(self):
            self.base, self.target, self.additive = 1.0, math.sqrt(0.5), True
            self.asked = []

        def error(self, pinned):
            self.asked.append(len(pinned))
            return math.sqrt(max(1 - 0.01 * len(pinned), 0))

        def predicted(self, pinned):
            return 1 - 0.005 * len(pinned)

        def _runs_left(self, max_runs):
            return True

        def _compare(self, pinned, error):
            pass

    search = Known()
    found = search._search([frozenset(range(n)) for n in range(150)], 7)
    assert 50 <= len(found) <= 54
    assert len(set(search.asked) - {0}) <= 3  # the prediction, and corrections


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

    class Known(_suggest._Search):
        def __init__(self):
            self.base, self.total, self.output = 1.0, 1.0, "restore"
            self.target = math.sqrt(0.7)
            self.errors = {}
            self.candidates = [
                Candidate(found, low=gains[name][0], price=gains[name][1])
                for found in named(model)
                if (name := found.names[0]) in gains  # not the root
            ]

        def error(self, pinned):
            gain = sum(gains[name][0] for name in pinned)
            # Together they gain more: float32 goes from one to the other.
            if {"block.up", "block.down"} <= pinned:
                gain += 0.3
            if "needed" in gains and "needed" not in pinned:
                gain -= 0.2
            asked.append(pinned)
            self.errors[pinned] = math.sqrt(1 - gain)
            return self.errors[pinned]

        def _runs_left(self, max_runs):
            return True

    search = Known()
    search._find_parts()
    search._make_cheaper(frozenset(bought), frozenset(), 9)
    assert search.best == left
    tried = [pinned for pinned in asked if pinned not in (bought, left)]
    assert len(tried) == len(set(tried))


@pytest.mark.parametrize(("probes", "most"), [(2, 16), (12, 21)])
def test_the_search_stops_where_it_gets_dear(monkeypatch, probes, most):
    def one_less(self, order, fails, meets, halve):
        return meets - 1  # a search that would take as many runs as there are modules

    monkeypatch.setattr(_suggest._Search, "_next", one_less)
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

    def forward(self, x):
        self.calls += 1 + 0 * torch.rand(())
        if self.fail is not None and torch.is_autocast_enabled("cpu") and self.calls > 2:
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
        ({"inputs": []}, "inputs: got no batch"),
        ({"candidates": "nothing"}, "no module matched"),
        ({"candidates": "^$"}, "candidates: got no module"),
    ],
)
def test_arguments_that_are_wrong(arguments, message):
    with pytest.raises(PinError, match=message):
        dtypepin.suggest(transformer(), **{"inputs": smooth(32, 16), **arguments})


def test_few_samples_and_noise_are_warned_of():
    model = transformer()
    with pytest.warns(PinWarning, match="2 samples x 6 probes"):
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
    monkeypatch.setattr(_suggest.sys.stderr, "isatty", lambda: True, raising=False)
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
