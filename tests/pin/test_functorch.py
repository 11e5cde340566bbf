"""Pinned modules under torch.func: grad, vmap, jvp, functional_call."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vmap

import dtypepin

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8), nn.BatchNorm1d(8))
        self.seen = []

    def forward(self, x):
        x = self.block(self.stem(x))
        self.seen.append(x.dtype)
        return x


def build(override):
    """A pinned model, and the same computation with its casts written by hand."""
    model = Net().bfloat16().eval()
    by_hand = copy.deepcopy(model)
    by_hand.block.float()
    inner = by_hand.block.forward
    by_hand.block.forward = lambda x: inner(x.float()).to(x.dtype)
    pins = dtypepin.apply(model, "^block$", override_parameters=override)
    if override:
        pins = dtypepin.apply(model, r"^block\.", override_parameters=True)
    return model, by_hand, pins


both = pytest.mark.parametrize("override", [False, True], ids=["cast", "stored"])


def values(model, dtype=None):
    return {k: v.detach().to(dtype or v.dtype) for k, v in model.named_parameters()}


@both
def test_grad_with_functional_call(override):
    model, by_hand, _ = build(override)
    x = torch.randn(4, 8, dtype=BF16)

    def loss(parameters, of):
        return functional_call(of, parameters, (x,)).float().pow(2).mean()

    before = {k: (v, v.dtype) for k, v in model.named_parameters()}
    got, expected = (grad(loss)(values(one), one) for one in (model, by_hand))
    assert list(got) == list(expected)
    for key, value in got.items():
        assert value.dtype is before[key][0].dtype
        assert torch.equal(value, expected[key].to(value.dtype))
    assert all(v is before[k][0] and v.dtype is before[k][1] for k, v in model.named_parameters())


@both
def test_functional_call_computes_with_the_given_parameters_in_the_pins_dtype(override):
    model, by_hand, _ = build(override)
    x = torch.randn(4, 8, dtype=BF16)
    given = {k: v * 2 for k, v in values(model, BF16).items()}
    own = {k: v.to(dict(by_hand.named_parameters())[k].dtype) for k, v in given.items()}
    kept = model(x)
    assert torch.equal(functional_call(model, given, (x,)), functional_call(by_hand, own, (x,)))
    assert torch.equal(model(x), kept)


@both
def test_vmap_over_inputs_and_over_stacked_models(override):
    model, by_hand, _ = build(override)
    xs = torch.randn(3, 4, 8, dtype=BF16)
    expected = torch.stack([by_hand(x) for x in xs])
    torch.testing.assert_close(vmap(model)(xs), expected, rtol=8e-3, atol=8e-3)

    stacked = {k: torch.stack([v, v * 0.5]) for k, v in values(model).items()}
    got = vmap(lambda p, x: functional_call(model, p, (x,)), (0, None))(stacked, xs[0])
    for i in range(2):
        own = {k: v[i].to(dict(by_hand.named_parameters())[k].dtype) for k, v in stacked.items()}
        torch.testing.assert_close(
            got[i], functional_call(by_hand, own, (xs[0],)), rtol=8e-3, atol=8e-3
        )


@both
def test_jvp(override):
    model, by_hand, _ = build(override)
    x, t = torch.randn(4, 8, dtype=BF16), torch.randn(4, 8, dtype=BF16)
    for got, expected in zip(jvp(model, (x,), (t,)), jvp(by_hand, (x,), (t,)), strict=True):
        assert got.dtype is BF16
        assert torch.equal(got, expected)


def test_the_pin_counts_under_every_transform():
    model = nn.Sequential(nn.LayerNorm(8), nn.BatchNorm1d(8)).eval().bfloat16()
    inside = []
    model[1].register_forward_hook(lambda m, args, out: inside.append((args[0].dtype, out.dtype)))
    dtypepin.apply(model, "^$", dtype="float64", output="keep")
    x = torch.randn(4, 8, dtype=BF16)
    assert vmap(model)(x.expand(3, 4, 8)).dtype is F64
    assert jvp(model, (x,), (x,))[1].dtype is F64
    assert grad(lambda y: model(y).sum())(x).dtype is BF16
    assert functional_call(model, values(model), (x,)).dtype is F64
    assert inside == [(F64, F64)] * 4


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
# Dynamo of torch 2.14 looks at ``.grad`` of the cast that functional_call has put back.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_functional_call_inside_a_pinned_forward_leaves_the_parameters_alone(autocast, compiled):
    class Meta(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

        def forward(self, x):
            twice = {k: v * 2 for k, v in self.inner.named_parameters()}
            outer = {k: v * 3 for k, v in self.inner.state_dict().items() if "running" in k}
            return functional_call(self.inner, {**twice, **outer}, (x,))

    model = Meta().bfloat16()
    before = {k: (v, v.clone()) for k, v in model.state_dict(keep_vars=True).items()}
    dtypepin.apply(model, "^$")
    call = torch.compile(model, backend="aot_eager") if compiled else model
    for _ in range(2):
        with torch.autocast("cpu", BF16, enabled=autocast):
            out = call(torch.randn(4, 8, dtype=BF16))
        assert out.dtype is BF16
        for key, value in model.state_dict(keep_vars=True).items():
            if isinstance(value, nn.Parameter) or not compiled:
                assert value is before[key][0]
            assert key.endswith("tracked") or torch.equal(value, before[key][1])
    out.sum().backward()
    assert model.inner[0].weight.grad.dtype is BF16
