"""A whole search: what it finds, what it costs, what it says."""

import copy
import math
import sys

import pytest
import torch
from advised import BF16, F32, relative_error, smooth, transformer
from torch import nn

import dtypepin
from dtypepin import PinError


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


def test_nothing_to_do():
    plan = dtypepin.suggest(transformer(), smooth(32, 16), absolute_tolerance=1.0)
    assert plan.reached
    assert plan.names == []
    with pytest.raises(PinError, match="the plan pins nothing"):
        plan.pin_arguments()


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


def test_a_seed_gives_the_same_plan():
    model, x = transformer(), smooth(32, 16)
    plans = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed + len(plans))
        plans.append(dtypepin.suggest(model, x, seed=seed))
    assert str(plans[0]) == str(plans[1])
    assert [row.share for row in plans[0].rows] != [row.share for row in plans[2].rows]


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
