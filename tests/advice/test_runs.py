"""Real runs, and their errors."""

import math

import pytest
import torch
from advised import F16, relative_error, smooth, transformer
from torch import nn

import dtypepin


def test_held_out_inputs():
    model, x = transformer(), smooth(64, 16)
    plan = dtypepin.suggest(model, x[:32], holdout=[x[32:48], x[48:]])
    before, after = plan.error_held_out
    assert before == pytest.approx(relative_error(model, x[32:]))
    assert after == pytest.approx(relative_error(model, x[32:], **plan.pin_arguments()))
    assert f"{after:.2e} with these pins" in str(plan)


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


def test_a_metric_without_a_number_is_a_failure():
    plan = dtypepin.suggest(transformer(), smooth(32, 16), metric=lambda a, b: math.nan)
    assert not plan.reached
