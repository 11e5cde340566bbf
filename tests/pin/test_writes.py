"""What a forward writes to its own tensors is in the stored ones afterwards, and nothing else."""

import copy
import tempfile
import warnings

import numpy as np
import pytest
import torch
from parameter_models import BF16, F16, F32, F64, bits
from test_standins import Does
from torch import nn
from torch.nn.utils import parametrize

import dtypepin
from dtypepin import PinError


def mul(m):
    m.w.mul_(1.1)


def through_data(m):
    m.w.data -= 0.5


def data_assigned(m):
    m.w.data = torch.round(m.w.data * 4) / 4


def part(m):
    m.w[:2].add_(1)


def foreach(m):
    torch._foreach_mul_([m.w, m.tied], 2.0)


def copied(m):
    m.w.copy_(torch.eye(4))


def by_numpy(m):
    if m.w.dtype is not BF16:  # which numpy lacks
        m.w.detach().numpy()[0] = 3


def new_parameter(m):
    m.w = nn.Parameter(m.w * 2)


def buffer_in_place(m):
    m.b.mul_(2)


def buffer_assigned(m):
    m.b = m.b + 1


def buffer_item(m):
    m.b[1] = 7


WRITES = [
    mul,
    through_data,
    data_assigned,
    part,
    foreach,
    copied,
    by_numpy,
    new_parameter,
    buffer_in_place,
    buffer_assigned,
    buffer_item,
]


@pytest.mark.parametrize("dtypes", [(BF16, F32), (F64, F32), (F32, BF16)])
@pytest.mark.parametrize("write", WRITES)
def test_what_a_forward_writes_arrives_in_its_own_dtype(write, dtypes):  # R3
    stored, pin = dtypes

    def forward(m, x):
        with torch.no_grad():
            write(m)
        return x @ m.w + m.b

    model, x = Does(forward, stored), torch.randn(3, 4).to(stored)
    twin = copy.deepcopy(model).to(pin)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with dtypepin.pin_dtype(model, "^$", dtype=pin, output="keep"):
        for _ in range(2):
            old = {name: value.clone() for name, value in twin.state_dict().items()}
            y = model(x)
            assert torch.equal(y, twin(x.to(pin)))
            # What the twin did not write keeps the bits that it has in the model.
            for name, value in twin.state_dict().items():
                right = torch.where(value == old[name], before[name], value.to(stored))
                assert torch.equal(bits(model.state_dict()[name]), bits(right)), name
                before[name] = right
                dict(twin.named_parameters(remove_duplicate=False), **dict(twin.named_buffers()))[
                    name
                ].data.copy_(right)
    assert {value.dtype for value in model.state_dict().values()} == {stored}
    assert all(isinstance(p, nn.Parameter) for p in model._parameters.values())


def test_a_weight_that_is_quantised_for_the_call_and_put_back():  # R3
    def forward(m, x):
        old = m.w.data
        m.w.data = torch.round(m.w.data * 4) / 4
        y = x @ m.w
        m.w.data = old
        return y

    model, x = Does(forward), torch.randn(3, 4).to(BF16)
    twin, before = copy.deepcopy(model).float(), bits(model.w)
    with dtypepin.pin_dtype(model, "^$", dtype="float32", output="keep"):
        assert torch.equal(model(x), twin(x.float()))
    assert torch.equal(bits(model.w), before)


def test_a_write_with_gradients_on_is_an_error_in_that_call():  # R3
    model = Does(lambda m, x: [m.w.mul_(2), x @ m.w][1])
    before = bits(model.w)
    with dtypepin.pin_dtype(model, "^$", dtype="float32"), pytest.raises(PinError, match="no_grad"):
        model(torch.ones(1, 4, dtype=BF16))
    assert torch.equal(bits(model.w), before)


def test_nothing_is_written_where_nothing_changed():
    model = Does(lambda m, x: x @ m.w + m.b)
    versions = model.w._version, model.b._version
    with dtypepin.pin_dtype(model, "^$", dtype="float32"):
        model(torch.ones(1, 4, dtype=BF16))
    assert (model.w._version, model.b._version) == versions


class Owner(nn.Module):
    def __init__(self, does):
        super().__init__()
        self.l, self.does = nn.Linear(4, 4, dtype=BF16), does

    def forward(self, x):
        return self.does(self.l, x)


class Twice(nn.Module):
    def forward(self, x):
        return x * 2


def registered_anew(linear, x):
    w = linear.weight
    del linear.weight
    linear.weight = w
    return linear(x)


def parametrized(linear, x):
    parametrize.register_parametrization(linear, "weight", Twice())
    y = linear(x)
    parametrize.remove_parametrizations(linear, "weight", leave_parametrized=False)
    return y


def by_register(linear, x):
    w = linear._parameters.pop("weight")
    linear.register_parameter("weight", w)
    return linear(x)


@pytest.mark.parametrize("does", [registered_anew, parametrized, by_register])
def test_a_parameter_that_is_registered_anew_is_the_same_one(does):  # R4
    model = Owner(does)
    twin = Owner(does).float()
    twin.load_state_dict(model.state_dict())
    own, before, x = model.l.weight, bits(model.l.weight), torch.randn(2, 4).to(BF16)
    with dtypepin.pin_dtype(model, "^$", dtype="float32", output="keep"):
        assert torch.equal(model(x), twin(x.float()))
        assert torch.equal(model(x), twin(x.float()))
    assert model.l.weight is own
    assert any(value is own for value in model.parameters())
    assert own.dtype is BF16
    assert torch.equal(bits(own), before)


def test_what_others_wrote_meanwhile_stays():  # B1
    def forward(m, x):
        y = x + m.b
        next(m.buffers()).add_(1)
        return y

    model = Does(forward, F16)
    right = model.b + 1
    with dtypepin.pin_dtype(model, "^$", dtype="float32"):
        model(torch.zeros(4, dtype=F16))
    assert torch.equal(model.b, right)


def test_elements_that_the_forward_wrote_and_those_of_others():  # B1
    def forward(m, x):
        m.b[0] = 5
        m.state_dict()["b"][1:] = 9
        return x

    model = Does(forward, F16)
    with dtypepin.pin_dtype(model, "^$", dtype="float32"):
        model(torch.zeros(4, dtype=F16))
    assert model.b.tolist() == [5, 9, 9, 9]


def test_a_buffer_over_memory_that_can_only_be_read():  # B2
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it is not writable
        np.save(f"{folder}/b.npy", np.ones(4, dtype=np.float16))
        read_only = torch.from_numpy(np.load(f"{folder}/b.npy", mmap_mode="r"))
        model = Does(lambda m, x: x + m.b)
        model.b = read_only
        with dtypepin.pin_dtype(model, "^$", dtype="float32"):
            assert model(torch.ones(4, dtype=F16)).tolist() == [2, 2, 2, 2]
        assert model.b is read_only
        del read_only, model


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr"])
@pytest.mark.filterwarnings("ignore:.*(S|s)parse.*:UserWarning")
def test_sparse_buffers(layout):  # B3
    eye = torch.eye(4)
    sparse = eye.to_sparse_bsr((2, 2)) if layout == "bsr" else getattr(eye, f"to_sparse_{layout}")()
    model, x = Does(lambda m, x: m.b @ x), torch.randn(4, 2)
    model.b = sparse
    with dtypepin.pin_dtype(model, "^$", dtype="float64", output="keep"):
        y = model(x)
    assert y.dtype is F64
    assert torch.equal(y, x.double())
    assert model.b is sparse
    assert model.b.dtype is F32
