"""The extra run without pins, which nobody notices."""

import copy
import pickle
import random
import threading
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import torch
from audited import BF16, F32, verdicts, x
from torch import nn

import dtypepin
from dtypepin._audit import nonfinite
from dtypepin._pin import hooks


def test_several_processes_do_not_run_a_forward_twice(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    m = nn.Sequential(nn.LayerNorm(4))
    pins = dtypepin.apply(m, "0")
    with dtypepin.audit(m) as report:
        m(x(F32))
    assert verdicts(report)["0"] == ("honoured", "")  # it has no effect, but who knows
    assert report.notes == ["several processes take part: 'no effect' was not measured"]
    monkeypatch.undo()
    pins.remove()


class Moody(nn.Module):
    """Draws random numbers, writes buffers and attributes, and grows a list."""

    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(4), nn.Dropout()
        self.calls, self.history = 0, []

    def forward(self, x, cache=None):
        self.calls += 1
        self.history.append(self.calls)
        if cache is not None:
            cache.seen.append(x)
        return self.dropout(self.norm(x))


def test_the_extra_run_is_not_noticed():
    outs, states = [], []
    for audited in (False, True):
        torch.manual_seed(0)
        m, cache = Moody().bfloat16(), SimpleNamespace(seen=[])
        dtypepin.apply(m, "^$")
        if audited:
            with dtypepin.audit(m) as report:
                outs.append(m(x(), cache))
            assert verdicts(report) == {"": ("honoured", "")}
        else:
            outs.append(m(x(), cache))
        assert (m.calls, m.history, len(cache.seen)) == (1, [1], 1)
        states.append((m.norm.running_mean, m.norm.num_batches_tracked, torch.rand(1)))
    assert torch.equal(*outs)
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_a_module_that_cannot_be_copied_is_honoured_unmeasured():
    m = nn.Sequential(nn.LayerNorm(4))
    m[0].lock = threading.Lock()
    with dtypepin.pin_dtype(m, "0"), dtypepin.audit(m) as report:
        m(x(F32))
    assert verdicts(report) == {"0": ("honoured", "")}
    assert report.notes == ["'no effect' could not be measured: '0'"]


class Restless(nn.Module):
    """Writes to its parameters, draws random numbers, and learns in its forward."""

    def __init__(self):
        super().__init__()
        self.weight, self.steps = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        with torch.enable_grad():
            (x * self.weight).sum().backward()
        with torch.no_grad():
            self.steps.add_(1)
        return x * self.steps + torch.rand(4) + random.random() + np.random.rand()


def test_parameters_gradients_and_other_random_numbers_survive_the_extra_run():
    outs = []
    for audited in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        m = nn.Sequential(Restless())
        with dtypepin.pin_dtype(m, "0"), ExitStack() as stack:
            if audited:
                report = stack.enter_context(dtypepin.audit(m))
            out = m(torch.ones(4))
        outs.append((out.tolist(), m[0].steps.tolist(), m[0].weight.grad.tolist()))
    assert verdicts(report)["0"][0] == "no effect"
    assert outs[0] == outs[1]


def test_it_is_measured_again_under_other_circumstances():
    m, value = nn.Sequential(nn.Linear(4, 4)), x(F32)
    for order in ((False, True), (True, False)):
        with dtypepin.pin_dtype(m, "0"), dtypepin.audit(m) as report:
            for on in order:
                with torch.autocast("cpu", BF16, enabled=on):
                    m(value)
        assert verdicts(report) == {"0": ("honoured", "")}


def test_an_inner_pin_that_the_extra_run_did_not_reach_is_said_to_be_unmeasured():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return self.a(x) if self.calls == 1 else self.b(x)

    m = nn.ModuleDict({"s": Sometimes()})
    with dtypepin.pin_dtype(m, [r"^s$", "b"]), dtypepin.audit(m) as report:
        m["s"](x(F32))
        m["s"](x(F32))
    assert verdicts(report)["s.b"] == ("honoured", "")
    assert report.notes == ["'no effect' could not be measured: 's.b'"]


def test_an_extra_run_that_fails_says_nothing_but_dtypes_that_clash_do():
    class Force(nn.Linear):
        def forward(self, x):
            if not nonfinite.quiet.on and fails and self.weight.dtype is x.dtype is BF16:
                raise ValueError("only where it is not pinned")
            (grad,) = torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)
            return grad

    fails = False
    m, value = nn.Sequential(Force(4, 1)), x(F32).requires_grad_()
    with dtypepin.pin_dtype(m, "0"), dtypepin.audit(m) as report:
        m(value)
    assert verdicts(report)["0"][0] == "no effect"  # gradients are there in it as well
    fails = True
    with dtypepin.pin_dtype(m.bfloat16(), "0"), dtypepin.audit(m) as report:
        m(x().requires_grad_())
    assert verdicts(report)["0"][0] == "honoured"
    assert report.notes == ["'no effect' could not be measured: '0'"]
    m = nn.Sequential(nn.Linear(4, 4)).bfloat16()
    with dtypepin.pin_dtype(m, "0"), dtypepin.audit(m) as report:
        m(x(F32))
    assert verdicts(report)["0"] == ("honoured", "")
    assert report.notes == []


def test_hooks_of_the_user_run_in_the_extra_run():
    m = nn.Sequential(nn.Softmax(-1))
    m[0].register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
    with dtypepin.pin_dtype(m, "0"), dtypepin.audit(m) as report:
        m(x(F32))
    assert verdicts(report) == {"0": ("honoured", "")}
    assert report.notes == []


def test_copies_made_inside_the_block_carry_no_recorder():
    m = nn.Sequential(nn.LayerNorm(4)).bfloat16()
    with dtypepin.pin_dtype(m, "0"), dtypepin.audit(m) as report:
        before = copy.deepcopy(m)
        m(x())
        after = copy.deepcopy(m)
        loaded = pickle.loads(pickle.dumps(m))
        for twin in (before, after, loaded):
            assert twin(x()).dtype is BF16
            assert len(list(hooks.on(twin[0]))) == 1
    assert [pin.calls for pin in report.pins] == [1]
    for twin in (before, after, loaded):
        twin(x())


def test_without_the_extra_run():
    m = nn.Sequential(nn.LayerNorm(4))
    with dtypepin.pin_dtype(m, "0"), dtypepin.audit(m, without_pins=False) as report:
        m(x(F32))
    assert verdicts(report) == {"0": ("honoured", "")}
