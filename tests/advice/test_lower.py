"""The model in low precision, and that it is as before afterwards."""

import random

import pytest
import torch
from advised import BF16, relative_error, smooth, transformer
from torch import nn

import dtypepin
from dtypepin import PinError, PinWarning


def test_dropout_makes_no_noise():
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(), nn.Linear(16, 16)).train()
    plan = dtypepin.suggest(model, smooth(32, 16))
    assert plan.error_before == pytest.approx(relative_error(model.eval(), smooth(32, 16)))


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


def test_parameters_that_a_forward_writes_to_are_named():
    class Writing(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.bias.mul_(0.5)
            return super().forward(x)

    with pytest.warns(PinWarning, match=r"not undone: 1\.bias"):
        dtypepin.suggest(nn.Sequential(nn.Linear(16, 16), Writing(16, 16)), smooth(32, 16))


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
