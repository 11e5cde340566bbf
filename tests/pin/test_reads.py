"""Reads of parameters and buffers in a region."""

import copy
import threading

import pytest
import torch
from parameter_models import BF16, F32, F64, state_bits
from torch import nn

import dtypepin
from dtypepin import PinError
from helpers import Seen


@pytest.mark.parametrize("override", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_norm_in_a_bf16_model(override, autocast):  # P1
    m = nn.Sequential(Seen(4), nn.Sequential(nn.LayerNorm(4), Seen(4)), Seen(4)).bfloat16()
    with (
        dtypepin.apply(m, r"^1(\.0|\.1)?$", override_parameters=override),
        torch.autocast("cpu", BF16, enabled=autocast),
    ):
        assert m(torch.randn(2, 4, dtype=BF16)).dtype is BF16
    assert m[1][1].seen == [(F32, F32, F32)]
    assert m[0].seen == m[2].seen == [(BF16, BF16, BF16)]


@pytest.mark.parametrize("override", [False, True])
def test_a_tie_outside_the_selection(override):  # P5
    m = nn.ModuleDict({"emb": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)}).bfloat16()
    m["head"].weight = m["emb"].weight
    if override:
        with pytest.raises(PinError) as error:
            dtypepin.apply(m, "^head$", override_parameters=True)
        for part in ("'head.weight'", "'emb.weight'", "leave override_parameters off"):
            assert part in str(error.value)
        assert m["emb"].weight.dtype is BF16
        assert not m["head"]._forward_hooks
        return
    with dtypepin.apply(m, "^head$", output="keep"):
        assert m["head"](torch.ones(1, 2, dtype=BF16)).dtype is F32
        assert m["head"].weight is m["emb"].weight
        assert m["emb"].weight.dtype is BF16


@pytest.mark.parametrize("override", [False, True])
def test_only_plain_floats_are_cast(override):  # P8
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.packed = nn.Parameter(torch.ones(2, dtype=torch.uint8), requires_grad=False)
            self.bias = nn.Parameter(torch.ones(2, dtype=BF16))
            self.register_buffer("scale", torch.ones(2).to(torch.float8_e4m3fn))
            self.register_buffer("mask", torch.ones(2, dtype=torch.bool))

        def forward(self, x):
            names = ("packed", "bias", "scale", "mask")
            self.seen = [getattr(self, name).dtype for name in names]
            return x

    m = Packed()
    with dtypepin.apply(m, "^$", override_parameters=override):
        m(torch.ones(2))
    assert m.seen == [torch.uint8, F32, torch.float8_e4m3fn, torch.bool]
    assert m.bias.dtype is BF16


@pytest.mark.parametrize("override", [False, True])
def test_gradients_arrive_on_the_original_in_its_dtype(override):
    torch.manual_seed(1)
    m = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).bfloat16()
    wide = copy.deepcopy(m).float()
    x = torch.randn(3, 4, dtype=BF16)
    with dtypepin.apply(m, "^$", override_parameters=override):
        m(x).sum().backward()
    wide(x.float()).bfloat16().sum().backward()
    for one, two in zip(m.parameters(), wide.parameters(), strict=True):
        assert one.grad.dtype is one.dtype is BF16
        assert torch.equal(one.grad, two.grad.bfloat16())


def test_everything_else_sees_the_originals_during_the_call():
    m = nn.Sequential(Seen(4)).bfloat16()
    weight = m[0].weight
    found = []

    def look(*_):
        found.append((next(m.parameters()) is weight, m.state_dict()["0.weight"].dtype))
        found.append((dict(m.named_parameters())["0.weight"] is weight, weight.grad))

    def in_a_thread(*_):
        thread = threading.Thread(target=lambda: found.append(m[0].weight is weight))
        thread.start()
        thread.join()

    with dtypepin.apply(m, "^$"):
        m[0].register_forward_hook(look)
        m[0].register_forward_hook(in_a_thread)
        m(torch.randn(2, 4, dtype=BF16))
    assert found == [(True, BF16), (True, None), True]


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
@pytest.mark.parametrize("train", [True, False])
def test_parametrized_modules_work(norm, train):
    make = getattr(nn.utils.parametrizations, norm)
    m = nn.Sequential(make(nn.Linear(4, 4))).bfloat16().train(train)
    before = state_bits(m)
    with dtypepin.apply(m, "^0$", output="keep") as pins:
        assert m(torch.randn(2, 4, dtype=BF16)).dtype is F32
        assert pins[0].class_name == "Linear"
    assert {k: v[0] for k, v in state_bits(m).items()} == {k: v[0] for k, v in before.items()}
    assert m(torch.randn(2, 4, dtype=BF16)).dtype is BF16


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
def test_a_pinned_parametrization_gets_all_parts_of_its_tensor_cast(norm):
    # The norms of Wav2Vec2 and its kin: ``class_patterns="Norm"`` finds their _WeightNorm too.
    make = getattr(nn.utils.parametrizations, norm)
    m = nn.Sequential(make(nn.Linear(4, 4))).bfloat16()
    x = torch.randn(2, 4, dtype=BF16)
    with (
        dtypepin.pin_dtype(m, class_patterns="_(Weight|Spectral)Norm") as pins,
        dtypepin.audit(m) as report,
    ):
        out = m(x)
        out.sum().backward()
        assert m[0].weight.dtype is out.dtype is BF16
    assert len(pins) == 1
    assert report.pins[0].verdict == "honoured"
    assert {p.grad.dtype for p in m.parameters()} == {BF16}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("pattern", ["^$", "^0$"])
def test_lazy_modules(pattern):
    m = nn.Sequential(nn.LazyLinear(4, dtype=BF16), nn.LazyBatchNorm1d(dtype=BF16))
    with pytest.raises(PinError, match="run one forward first"):
        dtypepin.apply(m, "0", override_parameters=True)
    with dtypepin.apply(m, pattern) as pins:
        assert m(torch.randn(3, 2, dtype=BF16)).dtype is BF16
        assert pins[0].ran
    assert m[0].weight.dtype is BF16


def test_a_weight_read_twice_and_a_parameter_that_is_none():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_parameter("bias", None)

        def forward(self, x):
            assert self.bias is None
            return x * self.weight + self.weight

    m = Reads()
    with dtypepin.apply(m, "^$", dtype=F64):
        m(torch.ones(2)).sum().backward()
    assert m.weight.grad.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("pattern", ["^$", "0"])
def test_weights_that_are_loaded_for_the_call_and_offloaded_after_it(pattern):
    """What Accelerate's cpu_offload does, inside ``forward``, by way of ``_parameters``."""

    class Offloaded(nn.Linear):
        def load(self, device):
            for name in list(self._parameters):
                kind, old = type(self._parameters[name]), getattr(self, name)
                value = kept[name] if device == "cpu" else old.to(device)
                self._parameters[name] = kind(value.to(old.dtype), requires_grad=False)

        def forward(self, x):
            self.load("cpu")
            out = super().forward(x)
            self.load("meta")
            return out

    m, x = nn.Sequential(Offloaded(4, 4)).bfloat16(), torch.randn(2, 4, dtype=BF16)
    kept = {name: value.detach().clone() for name, value in m[0].named_parameters()}
    with dtypepin.apply(m, pattern):
        for _ in range(2):
            out = m(x)
            expected = nn.functional.linear(x.float(), kept["weight"].float(), kept["bias"].float())
            assert torch.equal(out, expected.bfloat16())
    assert m[0].weight.dtype is BF16
    assert m[0].weight.is_meta
