"""Methods that somebody else patches, below a pin and above it."""

import itertools

import pytest
import torch
from torch import nn
from undone import F16, F32, F64, Net, picture, x

import dtypepin
from helpers import Seen


def patch(module, name):
    """Somebody else's patch, and how they take it off."""
    had, before = name in module.__dict__, getattr(module, name)
    module.__dict__[name] = lambda *args, **kwargs: before(*args, **kwargs)

    def undo():
        if had or module.__dict__.get("_restore", True):
            module.__dict__[name] = before

    return undo


@pytest.mark.parametrize("name", ["forward", "encode"])
@pytest.mark.parametrize("own", [False, True])
def test_a_method_in_the_instance_dict(name, own):  # U3
    m = Net()
    if own:
        original = getattr(m, name)
        m.__dict__[name] = lambda y: original(y) * 2
    before = picture(m)
    for _ in range(2):
        pins = dtypepin.apply(m, "^$", methods_to_override=[name], dtype="float64")
        expected = getattr(m, name)(x(F32))
        assert expected.dtype is F32
        pins.remove()
        pins.remove()
        assert picture(m).keys() == before.keys()
        assert picture(m)[""][0] == before[""][0]
        assert m.__dict__.get(name) is before[""][5].get(name)


@pytest.mark.parametrize("name", ["forward", "encode"])
@pytest.mark.parametrize("order", list(itertools.permutations(["ours", "theirs"])))
def test_somebody_patches_on_top(name, order):  # U3
    m = Net().eval()
    inputs = x(F32)
    plain = getattr(m, name)(inputs)
    pins = dtypepin.apply(m, "^$", methods_to_override=[name])
    undo = {"ours": pins.remove, "theirs": patch(m, name)}
    assert torch.equal(getattr(m, name)(inputs), plain)
    for who in order:
        undo[who]()
        assert torch.equal(getattr(m, name)(inputs), plain)
    # Their undo may have put our empty wrapper back: it takes itself off at the next call.
    if name == "encode":
        assert name not in m.__dict__


def test_an_empty_wrapper_left_by_a_patch_is_taken_off_by_unpin():  # U3
    m = Net()
    pins = dtypepin.apply(m, "^$", methods_to_override="encode")
    undo = patch(m, "encode")
    pins.remove()
    undo()
    assert dtypepin.unpin(m) == 0
    assert "encode" not in m.__dict__


def test_a_pin_on_top_of_a_patch_on_top_of_a_pin():  # U3, U5
    m = nn.Module()
    m.inner = Seen(4)
    m.__class__ = type("Coder", (nn.Module,), {"encode": lambda self, y: self.inner(y)})
    first = dtypepin.apply(m, "^$", dtype=F16, methods_to_override="encode")
    theirs = patch(m, "encode")
    second = dtypepin.apply(m, "^$", dtype=F64, methods_to_override="encode")
    m.encode(x(F32))
    second.remove()
    m.encode(x(F32))
    first.remove()
    m.encode(x(F32))
    theirs()
    m.encode(x(F32))
    assert [seen[0] for seen in m.inner.seen] == [F64, F16, F32, F32]
    assert "encode" not in m.__dict__
