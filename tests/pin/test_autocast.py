"""Autocast is off inside and untouched outside. A1 to A6 of the cases."""

import contextlib
import warnings

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import dtypepin
from helpers import Seen


def autocast(**kwargs):
    return torch.autocast("cpu", torch.bfloat16, **kwargs)


class Strict(nn.Module):
    """An inner op that refuses anything but float32."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        if y.dtype is not torch.float32:
            raise TypeError(f"expected float32, got {y.dtype}")
        return y


def test_everything_inside_is_float32():  # A1
    strict = Strict()
    with autocast():
        with pytest.raises(TypeError, match=r"got torch\.bfloat16"):
            strict(torch.randn(2, 4))
        with dtypepin.pin_dtype(strict, "^$"):
            assert strict(torch.randn(2, 4)).dtype is torch.float32
            assert torch.is_autocast_enabled("cpu")


def test_no_warning():  # A2
    with warnings.catch_warnings(), autocast(), dtypepin.pin_dtype(norm := nn.LayerNorm(4), "^$"):
        warnings.simplefilter("error")
        norm(torch.randn(2, 4))


class Asks(nn.Module):
    """Records on which devices autocast is on."""

    def __init__(self, device=None):
        super().__init__()
        self.seen = []
        if device:
            self.weight = nn.Parameter(torch.ones(1, device=device))

    def forward(self, x=None):
        self.seen.append([torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda", "xpu")])
        return x


@pytest.fixture
def all_on():
    before = {kind: torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda", "xpu")}
    for kind in before:
        torch.set_autocast_enabled(kind, True)
    yield
    for kind, on in before.items():
        torch.set_autocast_enabled(kind, on)


@pytest.mark.parametrize("x", [torch.ones(2), torch.arange(2)], ids=["float", "int"])
def test_only_the_inputs_device_is_switched_off(all_on, x):  # A3
    asks = Asks()
    with dtypepin.apply(asks, "^$"):
        asks(x)
    assert asks.seen == [[False, True, True]]
    assert all(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda", "xpu"))


def test_without_tensor_input_the_parameters_device_counts(all_on):  # A3
    asks, none = Asks("cpu"), Asks()
    with dtypepin.apply(asks, "^$"), dtypepin.apply(none, "^$"):
        asks()
        none()
    assert asks.seen == [[False, True, True]]
    assert none.seen == [[True, False, True]]  # nothing tells: one that is on, not the CPU first


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_another_device_is_switched_off_alone(all_on, kind, fails):  # A3
    class Raises(Asks):
        def forward(self, x):
            super().forward(x)
            if fails:
                raise ValueError("inside")
            return x

    asks, devices = Raises(), ("cpu", "cuda", "xpu")
    torch.set_autocast_enabled("cpu", False)
    with FakeTensorMode(), dtypepin.apply(asks, "^$"), contextlib.suppress(ValueError):
        asks(torch.ones(2, device=kind))
    assert asks.seen == [[False, kind != "cuda", kind != "xpu"]]
    assert [torch.is_autocast_enabled(k) for k in devices] == [False, True, True]


@pytest.mark.parametrize("given", ["input", "no input"])
def test_a_device_without_autocast_is_no_error(given):  # A3
    asks = Asks("meta")
    with dtypepin.apply(asks, "^$"), autocast():
        asks(*[torch.ones(2, 4, dtype=torch.half, device="meta")][: given == "input"])
    assert asks.seen == [[True, False, False]]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.half])
@pytest.mark.parametrize("levels", [(True, False, True), (False, True), (True, True)])
def test_each_level_of_nested_autocast_is_as_it_was(levels, kind, fails):
    m = Interrupted(ValueError("inside") if fails else None)
    dtypepin.apply(m, "^$")

    def at(levels):
        with torch.autocast("cpu", kind, enabled=levels[0]):
            with contextlib.suppress(ValueError):
                assert m(torch.randn(2, 4)).dtype is torch.float32
            if levels[1:]:
                at(levels[1:])
            assert torch.is_autocast_enabled("cpu") is levels[0]
            assert torch.get_autocast_dtype("cpu") is kind
            out = nn.functional.linear(torch.ones(1, 4), torch.ones(4, 4))
            assert out.dtype is (kind if levels[0] else torch.float32)

    at(levels)
    assert m.seen == [False] * len(levels)


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.half),
    ],
)
@pytest.mark.parametrize("order", [1, -1])
def test_nested_pins_each_compute_in_their_own_dtype(outer, inner, on, order):  # A4
    m = nn.Sequential(Seen(4), nn.Sequential(Seen(4)), Seen(4))
    pins = [("^$", outer), ("^1$", inner)]
    for pattern, dtype in pins[::order]:
        dtypepin.apply(m, pattern, dtype=dtype)
    with autocast(enabled=on):
        assert m(torch.randn(2, 4).half()).dtype is torch.half
    assert m[0].seen == [(outer,) * 3]
    assert m[1][0].seen == [(inner,) * 3]
    assert m[2].seen == [(outer,) * 3]


class OwnAutocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        with autocast():
            return self.inner(x)


def test_the_users_own_autocast_inside_is_respected():  # A5
    m = OwnAutocast()
    with dtypepin.apply(m, "^$", output="keep"), autocast():
        assert m(torch.randn(2, 4)).dtype is torch.bfloat16
        assert torch.is_autocast_enabled("cpu")


class Interrupted(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.inner, self.error, self.seen = nn.Linear(4, 4, bias=False), error, []

    def forward(self, x):
        self.seen.append(torch.is_autocast_enabled("cpu"))
        y = self.inner(x)
        if self.error:
            raise self.error
        return y


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, ValueError])
@pytest.mark.parametrize("override", [False, True])
def test_after_an_interrupt_new_weights_are_used(error, override):  # A6, F2
    m = nn.Sequential(nn.Linear(4, 4, bias=False), Interrupted(error)).bfloat16()
    dtypepin.apply(m, "^1$", override_parameters=override)
    x = torch.randn(2, 4)
    with pytest.raises(error), autocast():
        m(x)
    assert not torch.is_autocast_enabled("cpu")
    m[1].error = None
    with torch.no_grad():
        for weight in m.parameters():
            weight.zero_()
    with autocast():
        assert m(x).abs().max() == 0
        assert torch.is_autocast_enabled("cpu")
    assert m[1].inner.weight is next(m[1].inner.parameters())


def test_the_outer_region_has_its_autocast_again_after_an_exception():  # F1
    m = Interrupted(ValueError("inside"))
    dtypepin.apply(m, "^$")
    with autocast():
        with pytest.raises(ValueError, match="inside"):
            m(torch.randn(2, 4))
        assert torch.is_autocast_enabled("cpu")
        m.error = None
        assert m(torch.randn(2, 4)).dtype is torch.float32
        assert m.inner(torch.randn(2, 4)).dtype is torch.bfloat16
