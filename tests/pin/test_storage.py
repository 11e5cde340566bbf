"""Parameters stored in the pin's dtype, and the way back."""

import pytest
import torch
from parameter_models import BF16, F16, F32, F64, bits, same_state, state_bits
from torch import nn

import dtypepin
from dtypepin import PinWarning
from helpers import Seen


def test_stored_parameters_are_the_same_objects_with_their_gradients():  # P2
    m = nn.LayerNorm(4).bfloat16()
    m(torch.randn(2, 4, dtype=BF16)).sum().backward()
    weight, grad = m.weight, m.weight.grad.clone()
    with dtypepin.apply(m, "^$", override_parameters=True):
        assert m.weight is weight
        assert (m.weight.dtype, m.weight.grad.dtype) == (F32, F32)
        assert torch.equal(m.weight.grad, grad.float())
    assert (m.weight.dtype, m.weight.grad.dtype) == (BF16, BF16)
    assert torch.equal(m.weight.grad, grad)


def blanket(kind):
    return {
        "half": lambda m: m.half(),
        "bfloat16": lambda m: m.bfloat16(),
        "to": lambda m: m.to(BF16),
        "assign": lambda m: m.load_state_dict(
            {k: v.bfloat16() if v.is_floating_point() else v for k, v in m.state_dict().items()},
            assign=True,
        ),
    }[kind]


@pytest.mark.parametrize("kind", ["half", "bfloat16", "to", "assign"])
@pytest.mark.parametrize("override", [False, True])
def test_a_later_blanket_cast_does_not_break_the_pin(kind, override):  # P3
    m = nn.Sequential(nn.BatchNorm1d(4), Seen(4))
    pins = dtypepin.apply(m, r"^[01]$", override_parameters=override)
    blanket(kind)(m)
    dtype = F16 if kind == "half" else BF16
    assert m(torch.randn(3, 4, dtype=dtype)).dtype is dtype
    assert m[1].seen == [(F32, F32, F32)]
    if override:
        with pytest.warns(PinWarning, match="digits which that cast cut off are lost") as caught:
            names = pins.check()
        assert len(caught) == 1
        assert {"0.weight", "0.running_mean", "1.weight"} <= set(names)
        assert m[1].weight.dtype is F32
        m[1].seen.clear()
        m(torch.randn(3, 4, dtype=dtype))
        assert m[1].seen == [(F32, F32, F32)]
    assert pins.check() == []
    pins.remove()
    # As if the pin had never been there: the blanket cast is what stays.
    assert m[1].weight.dtype is m[0].running_mean.dtype is dtype


def test_a_tie_inside_the_selection_is_stored_once_and_undone():  # P5
    m = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}).bfloat16()
    m["b"].weight = m["a"].weight
    before = state_bits(m)
    pins = dtypepin.apply(m, "^[ab]$", override_parameters=True)
    assert m["b"].weight is m["a"].weight
    assert m["a"].weight.dtype is F32
    pins[0].remove()
    assert m["a"].weight.dtype is F32  # b still wants it
    pins.remove()
    assert same_state(state_bits(m), before)


def test_an_optimizer_made_while_pinned_keeps_its_parameters():  # P6
    m = nn.Sequential(Seen(4)).bfloat16()
    pins = dtypepin.apply(m, "^0$", override_parameters=True)
    optimizer = torch.optim.Adam(m.parameters(), lr=0.1)
    before = m[0].weight.detach().clone()
    m(torch.randn(2, 4, dtype=BF16)).sum().backward()
    optimizer.step()
    assert optimizer.state[m[0].weight]["exp_avg"].dtype is F32
    assert not torch.equal(m[0].weight, before)
    trained = m[0].weight.detach().clone()
    pins.remove()
    assert m[0].weight is optimizer.param_groups[0]["params"][0]
    assert torch.equal(m[0].weight, trained.bfloat16())


def test_a_linear_in_float16_with_a_grad_scaler():  # P7
    m = nn.Sequential(Seen(4), nn.Linear(4, 4))
    dtypepin.apply(m, "^0$", dtype="float16")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    before = m[0].weight.detach().clone()
    scaler.scale(m(torch.randn(2, 4)).sum()).backward()
    assert m[0].weight.grad.dtype is F32
    scaler.step(optimizer)
    assert m[0].seen == [(F16, F16, F16)]
    assert m[0].weight.dtype is F32
    assert not torch.equal(m[0].weight, before)


@pytest.mark.parametrize("override", [False, True])
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
@pytest.mark.parametrize("stored", [F16, BF16, F32, F64])
def test_state_dict_has_its_keys_pinned_and_its_bits_after(stored, dtype, override):  # P9, P10
    m = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)).to(stored)
    with torch.no_grad():
        m[0].running_mean.uniform_()
        m[1].weight[0, 0], m[1].weight[0, 1] = float("nan"), 1e-30
    before = state_bits(m)
    pins = dtypepin.apply(m, "^[01]$", dtype=dtype, override_parameters=override)
    assert list(m.state_dict()) == list(before)
    assert m.state_dict()["1.weight"].dtype is (dtype if override else stored)
    pins.remove()
    assert same_state(state_bits(m), before)


def test_what_was_trained_while_narrowed_stays_trained():  # P10
    m = nn.Linear(2, 2)
    untouched = bits(m.bias)
    pins = dtypepin.apply(m, "^$", dtype="bf16", override_parameters=True)
    with torch.no_grad():
        m.weight.fill_(0.5)
    pins.remove()
    assert m.weight.unique().tolist() == [0.5]
    assert torch.equal(bits(m.bias), untouched)


@pytest.mark.parametrize(("wide", "narrow"), [(F32, BF16), (BF16, F32)])
def test_a_model_on_meta_that_is_materialised_while_it_is_stored(wide, narrow):
    with torch.device("meta"):
        m = nn.Sequential(nn.Linear(2, 2, dtype=wide))
    pins = dtypepin.apply(m, "0", dtype=narrow, override_parameters=True)
    m.to_empty(device="cpu")
    nn.init.ones_(m[0].weight)
    pins.remove()
    assert m[0].weight.dtype is wide
    assert m[0].weight.unique().tolist() == [1]


def test_a_parametrization_that_came_later_does_not_keep_a_weight_stored():
    m = nn.Sequential(nn.Linear(2, 2)).bfloat16()
    pins = dtypepin.apply(m, "0", override_parameters=True)
    nn.utils.parametrize.register_parametrization(m[0], "weight", nn.Identity())
    assert m(torch.ones(1, 2, dtype=BF16)).dtype is BF16
    pins.remove()
    assert {value.dtype for value in m.parameters()} == {BF16}


@pytest.mark.parametrize("where", ["apply", "remove", "check", "all"])
def test_parameters_stored_in_inference_mode_can_be_trained(where):
    m, x = nn.Linear(4, 4).bfloat16(), torch.randn(3, 4).bfloat16()
    with torch.inference_mode(where in ("apply", "all")):
        pins = dtypepin.apply(m, "^$", override_parameters=True)
    m.bfloat16()
    with torch.inference_mode(where in ("check", "all")), pytest.warns(dtypepin.PinWarning):
        pins.check()
    if where != "all":
        m(x).sum().backward()
    with torch.inference_mode(where in ("remove", "all")):
        pins.remove()
    m(x).sum().backward()
    assert m.weight.grad.dtype is torch.bfloat16


def test_parameters_made_in_inference_mode_can_be_stored():
    with torch.inference_mode():
        m = nn.Linear(4, 4).bfloat16()
    with dtypepin.pin_dtype(m, "^$", override_parameters=True):
        assert m.weight.dtype is torch.float32
    assert m.weight.dtype is torch.bfloat16
    assert m.weight.is_inference()


@pytest.mark.parametrize("checked", [False, True])
def test_digits_return_also_in_a_wider_dtype_than_they_had(checked):
    m = nn.Linear(4, 4)
    before = m.weight.detach().double()
    pins = dtypepin.apply(m, "^$", dtype="bf16", override_parameters=True)
    m.double()
    if checked:
        with pytest.warns(dtypepin.PinWarning, match="were cast since"):
            pins.check()
        assert m.weight.dtype is torch.bfloat16
    pins.remove()
    assert torch.equal(m.weight, before)


@pytest.mark.parametrize("checked", [False, True])
def test_digits_return_also_where_somebody_widened_a_narrowed_parameter(checked):
    m = nn.Linear(4, 4)
    before = m.weight.detach().clone()
    pins = dtypepin.apply(m, "^$", dtype="bf16", override_parameters=True)
    with torch.no_grad():
        m.weight[0] = 0.5  # trained
    m.float()
    if checked:
        with pytest.warns(dtypepin.PinWarning, match="were cast since") as caught:
            pins.check()
        assert "digits" not in str(caught[0].message)  # widening cuts none off
        assert m.weight.dtype is torch.bfloat16
    pins.remove()
    assert torch.equal(m.weight[1:], before[1:])
    assert torch.equal(m.weight[0], torch.full((4,), 0.5))
