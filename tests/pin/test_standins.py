"""What a reader holds in a region is, to whoever asks, the module's own parameter or buffer."""

import copy
import pickle

import pytest
import torch
from parameter_models import BF16, F32, F64, bits
from torch import nn

import dtypepin


class Does(nn.Module):
    """A parameter, a buffer, and a forward from outside."""

    def __init__(self, forward, dtype=BF16):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4).to(dtype))
        self.tied = self.w
        self.register_buffer("b", torch.randn(4).to(dtype))
        self.does = forward

    def forward(self, x):
        return self.does(self, x)


def pinned(forward, **settings):
    model = Does(forward)
    dtypepin.apply(model, "^$", **{"dtype": "float32", "output": "keep"} | settings)
    return model


def seen(look, grad=True):
    """What ``look(module)`` gives in the region."""
    found = []
    with torch.set_grad_enabled(grad):
        pinned(lambda m, x: [found.append(look(m)), x][1])(torch.ones(2, 4, dtype=BF16))
    return found[0]


@pytest.mark.parametrize("grad", [True, False])
def test_it_is_the_parameter_to_whoever_asks(grad):  # R1
    def look(m):
        w = m.w
        return [
            isinstance(w, nn.Parameter),
            isinstance(w, torch.Tensor),
            w is m.w,
            w is m.tied,
            w is m._parameters["w"],
            w.requires_grad,
            w.is_leaf,
            w.grad_fn is None,
            w.dtype is F32,
            w.grad is None,
            not isinstance(m.b, nn.Parameter),
            m.b is m.b,
            type(w * 2) is torch.Tensor,
            copy.deepcopy(w).dtype is F32 and isinstance(copy.deepcopy(w), nn.Parameter),
            pickle.loads(pickle.dumps(m.b)).dtype is BF16,
        ]

    assert all(seen(look, grad))


def test_attributes_of_a_parameter_are_read_set_and_deleted_on_it():  # R1
    def forward(m, x):
        m.w.seen = m.w.k
        del m.w.gone
        return x * getattr(m.w, "k", 1.0)

    model = pinned(forward)
    model.w.k, model.w.gone = 2.0, True
    assert model(torch.ones(1, dtype=BF16)).item() == 2
    assert model.w.seen == 2
    assert not hasattr(model.w, "gone")


def test_a_gradient_by_its_own_weight_in_a_forward():  # R2
    def forward(m, x):
        (g,) = torch.autograd.grad((x @ m.w).pow(2).sum(), m.w, create_graph=True)
        return (g**2).sum()

    model, x = pinned(forward), torch.randn(3, 4).to(BF16)
    twin = Does(forward, F32)
    twin.w.data.copy_(model.w.data)
    y, right = model(x), twin(x.float())
    assert torch.equal(y, right)
    y.backward()
    right.backward()
    assert torch.equal(model.w.grad, twin.w.grad.to(BF16))


def test_hooks_and_requires_grad_are_set_on_the_parameter():
    calls = []

    def forward(m, x):
        m.w.register_post_accumulate_grad_hook(lambda p: calls.append(p))
        m.b.requires_grad_(False)
        return x @ m.w

    model = pinned(forward)
    model(torch.ones(1, 4, dtype=BF16)).sum().backward()
    assert calls[0] is model.w
    assert model.w.grad.dtype is BF16
    frozen = pinned(lambda m, x: [m.w.requires_grad_(False), x][1])
    frozen(torch.ones(1))
    assert not frozen.w.requires_grad


def test_a_container_reads_its_own_dicts():  # R8
    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("b", torch.ones(4, dtype=BF16))
            self.w = nn.Parameter(torch.ones(4, dtype=BF16))

        def __getitem__(self, key):
            return self._buffers[key] if key in self._buffers else self._parameters[key]

        def forward(self, x):
            assert self["b"].dtype is self["w"].dtype is x.dtype is F64
            return x * self["b"] * self["w"]

    model = Holds()
    dtypepin.apply(model, "^$", dtype="float64")
    assert model(torch.ones(4, dtype=BF16)).dtype is BF16


@pytest.mark.parametrize("dtype", [BF16, F32, F64])
def test_a_master_that_is_swapped_in_for_a_call_is_not_changed(dtype):  # R5
    master = nn.Parameter(torch.randn(4, 4))
    before = bits(master)

    def forward(m, x):
        placeholder = m._parameters["w"]
        m._parameters["w"] = master
        y = x @ m.w
        m._parameters["w"] = placeholder
        return y

    model, x = pinned(forward, dtype=dtype), torch.randn(2, 4).to(BF16)
    own = model.w
    y = model(x)
    assert torch.equal(y, x.to(dtype) @ master.to(dtype))
    assert model.w is own
    assert own.dtype is BF16
    assert master.dtype is F32
    assert torch.equal(bits(master), before)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_codes_that_are_viewed_as_another_dtype_are_the_stored_bits(dtype):  # R7
    codes = torch.randint(0, 255, (4, 8), dtype=torch.uint8)

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(codes.clone().view(BF16), requires_grad=False)

        def forward(self, x):
            return x @ self.w.view(torch.uint8).to(x.dtype)

    model, x = Packed(), torch.randn(2, 4).to(BF16)
    wide = getattr(torch, dtype)
    right = (x.to(wide) @ codes.to(wide)).to(BF16)
    with dtypepin.pin_dtype(model, "^$", dtype=dtype):
        assert torch.equal(model(x), right)
    assert torch.equal(model.w.view(torch.uint8), codes)


def test_after_the_region_it_is_an_ordinary_tensor():
    kept = []
    pinned(lambda m, x: [kept.append(m.w), x @ m.w][1])(torch.ones(1, 4, dtype=BF16))
    assert type(kept[0]) is torch.Tensor
    assert kept[0].dtype is F32
    torch.save(kept[0].detach(), "/dev/null")
