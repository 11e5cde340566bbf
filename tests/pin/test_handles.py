"""Handles: undo, and pins switched off for a while."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from undone import BF16, F16, F32, F64, Net, picture, x

import dtypepin
from dtypepin import PinError
from helpers import Seen


@pytest.mark.parametrize("override", [False, True])
def test_after_remove_the_model_was_never_pinned(override):  # U6
    m = Net().bfloat16()
    never = copy.deepcopy(m)
    before = picture(m)
    with dtypepin.apply(m, "", override_parameters=override, methods_to_override="forward"):
        pass
    with dtypepin.apply(m, "^$", methods_to_override=["encode"], override_parameters=override):
        pass
    assert picture(m) == before
    assert all(
        not hooks
        for part in m.modules()
        for hooks in (part._forward_hooks, part._forward_pre_hooks)
    )
    inputs = x()
    assert torch.equal(m(inputs), never(inputs))


def test_handles_keep_no_model_alive():  # U6
    m = Net()
    pins = dtypepin.apply(m, "norm", override_parameters=True)
    gone = weakref.ref(m), weakref.ref(m.norm), weakref.ref(m.norm.weight)
    del m
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3
    assert pins[0].module is None
    assert not pins[0].active
    pins.remove()
    assert "removed" in str(pins)


def test_one_that_cannot_be_removed_does_not_keep_the_others_on(monkeypatch):
    m = Net()
    pins = dtypepin.apply(m, "^(lin|norm)$")
    monkeypatch.setattr(pins[1]._pin.handles[0], "remove", lambda: 1 / 0)
    with pytest.raises(PinError, match="'norm': ZeroDivisionError"):
        pins.remove()
    assert not m.lin._forward_hooks


@pytest.mark.parametrize("override", [False, True])
def test_disabled_switches_off_in_this_thread_only(override):
    m = nn.Sequential(Seen(4), Seen(4)).bfloat16()
    pins = dtypepin.apply(m, r"^\d$", override_parameters=override)
    with pins.disabled():
        with pins.disabled():
            m(x())
        thread = threading.Thread(target=lambda: m(x()))
        thread.start()
        thread.join()
        m(x())
    m(x())
    off, on = (BF16, BF16, BF16), (F32, F32, F32)
    assert m[1].seen == [off, on, off, on]
    assert m[0].weight.dtype is (F32 if override else BF16)


def test_a_disabled_inner_pin_leaves_the_outer_one_on():
    m = nn.Sequential(Seen(4))
    dtypepin.apply(m, "^$", dtype=F64)
    inner = dtypepin.apply(m, "0", dtype=F16)
    with inner.disabled():
        m(x(F32))
    m(x(F32))
    assert [seen[1] for seen in m[0].seen] == [F64, F16]


def test_pins_are_a_sequence():
    pins = dtypepin.apply(Net(), "^(lin|norm)$")
    assert [pin.name for pin in pins] == ["lin", "norm"]
    assert list(pins[:1]) == [pins[0]]
    assert len(dtypepin.select(Net(), "lin")) == 1


@pytest.mark.parametrize("grad", [False, True])
def test_what_ran_out_of_memory_can_be_tried_again(grad, monkeypatch):
    m = Net().bfloat16().eval()
    if grad:
        m.norm(x()).sum().backward()
        m.lin(x()).sum().backward()
    before, grads = picture(m), [value.grad for value in m.parameters()]
    wanted = F32

    def fails(tensor, dtype):
        last = tensor is m.norm.bias.grad if grad else tensor.shape == (4, 4)
        if dtype is wanted and last:
            raise torch.OutOfMemoryError("no")
        return tensor.to(dtype)

    with monkeypatch.context() as patched:
        patched.setattr(dtypepin._pin.storage, "cast", fails)
        with pytest.raises(torch.OutOfMemoryError):
            dtypepin.apply(m, "", override_parameters=True)
    assert picture(m) == before
    for value, old in zip(m.parameters(), grads, strict=True):
        assert (value.grad is None) == (old is None)
        assert old is None or (value.grad.dtype is BF16 and torch.equal(value.grad, old))

    pins = dtypepin.apply(m, "", override_parameters=True)
    wanted = BF16
    with monkeypatch.context() as patched:
        patched.setattr(dtypepin._pin.storage, "cast", fails)
        with pytest.raises(PinError, match="no"):
            pins.remove()
    assert m(x()).dtype is BF16  # still pinned
    assert any(pin.active for pin in pins)
    pins.remove()
    assert picture(m) == before
    assert not any(pin.active for pin in pins)


def test_blocks_of_disabled_pins_end_in_any_order():
    m = nn.Sequential(nn.Linear(4, 4)).bfloat16()
    pins = dtypepin.apply(m, "0", output="keep")
    first, second = pins.disabled(), pins.disabled()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert m(x()).dtype is BF16
    second.__exit__(None, None, None)
    assert m(x()).dtype is F32
