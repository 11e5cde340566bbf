"""Batches and arguments, and what is refused."""

import functools
import math

import pytest
import torch
from advised import BF16, F32, smooth, transformer
from torch import nn

import dtypepin
from dtypepin import PinError, PinWarning


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


def test_in_place_modules_do_not_write_into_the_inputs():
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(16, 16), nn.ReLU(inplace=True))
    x = smooth(32, 16)
    dtypepin.suggest(model, x, tolerance=0.9, absolute_tolerance=1e-9)
    assert torch.equal(x, smooth(32, 16))


def test_batches_may_differ_in_size():
    model, x = transformer(), smooth(66, 16)
    sums = []
    for batches in (x, [x[:64], x[64:]], [x[:2], x[2:]]):
        rows = dtypepin.suggest(model, batches, probes=8).rows
        sums.append(sum(row.share for row in rows))
    assert sums[1] == pytest.approx(sums[0], rel=0.1)
    assert sums[2] == pytest.approx(sums[0], rel=0.1)


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
