"""Pins as they stand on modules: several on one, put on and taken off."""

import contextlib
import gc
import itertools
import threading
import weakref

import pytest
import torch
from torch import nn
from undone import BF16, F16, F32, F64, Net, picture, x

import dtypepin
from helpers import Seen


def test_the_same_pin_twice_is_one_pin_until_both_are_removed():  # U4
    m = Net().bfloat16()
    first = dtypepin.apply(m, "^(lin|norm)$")
    second = dtypepin.apply(m, "^(lin|norm)$")
    assert len(m.lin._forward_pre_hooks) == len(m.lin._forward_hooks) == 1
    first.remove()
    assert second[0].active
    assert m.lin._forward_hooks
    second.remove()
    assert not m.lin._forward_hooks


def test_an_inner_identical_block_leaves_the_outer_pin_on():  # U4
    m = nn.Sequential(Seen(4))
    with dtypepin.pin_dtype(m, "0", dtype=F64):
        with dtypepin.pin_dtype(m, "0", dtype=F64):
            m(x(F32))
        m(x(F32))
    m(x(F32))
    assert [seen[0] for seen in m[0].seen] == [F64, F64, F32]


@pytest.mark.parametrize("override", [False, True])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_pins_of_other_dtypes_on_one_module_in_any_order(order, override):  # U5
    m = nn.Sequential(Seen(4), nn.BatchNorm1d(4)).bfloat16()
    before = picture(m)
    dtypes = [F64, F16, F32]
    pins = [dtypepin.apply(m, "^[01]$", dtype=d, override_parameters=override) for d in dtypes]
    standing = list(range(3))
    for gone in (None, *order):
        if gone is not None:
            pins[gone].remove()
            standing.remove(gone)
        counts = dtypes[standing[-1]] if standing else BF16
        m[0].seen.clear()
        assert m[0](x()).dtype is BF16
        assert m[0].seen == [(counts,) * 3]
        if override:
            assert m[0].weight.dtype is m[1].running_mean.dtype is counts
    m[0].seen.clear()
    assert picture(m) == before


def test_the_earlier_pin_casts_nothing_while_a_later_one_counts():  # U5
    m = nn.Sequential(Seen(1))
    dtypepin.apply(m, "0", dtype="bf16")
    dtypepin.apply(m, "0", dtype="float64")
    value = torch.tensor([[1 + 2**-20]])
    with torch.no_grad():
        m[0].weight.fill_(1.0)
    assert torch.equal(m(value), value)  # through bf16 it would be 1


def test_a_pinned_forward_makes_no_reference_cycle():
    m = Net()
    pins = dtypepin.apply(m, "norm")
    gone = weakref.ref(m)
    gc.disable()
    try:
        del m
        assert gone() is None
    finally:
        gc.enable()
    assert pins[0].module is None


@pytest.mark.parametrize("method", ["forward", "encode"])
@pytest.mark.parametrize("where", ["inside", "other thread"])
@pytest.mark.parametrize("override", [False, True])
def test_a_call_that_is_running_while_its_pin_is_removed_ends_as_it_began(where, override, method):
    class Removes(Net):
        def forward(self, x, depth=1):
            if where == "inside":
                pins.remove()
            else:
                worker = threading.Thread(target=pins.remove)
                worker.start()
                worker.join()
            seen.append((x.dtype, self.lin.weight.dtype))
            return self(x, depth - 1) if depth else self.lin(x)

        encode = forward

    m, seen = Removes().bfloat16(), []
    before = picture(m)
    pins = dtypepin.apply(m, "", override_parameters=override, methods_to_override=method)
    call = m if method == "forward" else m.encode
    with torch.autocast("cpu", F16):
        assert call(x()).dtype is BF16
        assert torch.is_autocast_enabled("cpu")
    assert seen == [(F32, F32)] * 2
    assert not any(pin.active for pin in pins)
    assert picture(m) == before
    assert m.lin(x()).dtype is BF16


def test_a_removed_pin_of_a_call_that_ctrl_c_ended_goes_at_the_next_chance():
    class Stops(Net):
        def forward(self, x):
            pins.remove()
            raise KeyboardInterrupt

    m = Stops().bfloat16()
    before = picture(m)
    pins = dtypepin.apply(m, "^$")
    with pytest.raises(KeyboardInterrupt):
        m(x())
    assert dtypepin.unpin(m) == 0
    assert picture(m) == before


@pytest.mark.parametrize("method", ["forward", "encode"])
def test_a_pin_that_was_removed_while_it_runs_can_be_applied_again(method):
    class Replaces(Net):
        def forward(self, x):
            pins.remove()
            again.append(dtypepin.apply(self, "^$", methods_to_override=method))
            return self.lin(x)

        encode = forward

    m, again = Replaces().bfloat16(), []
    before = picture(m)
    pins = dtypepin.apply(m, "^$", methods_to_override=method)
    assert (m if method == "forward" else m.encode)(x()).dtype is BF16
    assert again[0][0].active
    again[0].remove()
    assert picture(m) == before


def test_unpin_inside_a_running_call_lets_it_end_as_it_began():
    class Unpins(Net):
        def forward(self, x):
            assert dtypepin.unpin(m) == 1
            return self.lin(x)

    m = Unpins().bfloat16()
    before = picture(m)
    dtypepin.apply(m, "^$")
    assert m(x()).dtype is BF16  # a dtype error where the weights are unpinned at once
    assert picture(m) == before


@pytest.mark.parametrize("take_off", ["remove", "block"])
def test_what_ctrl_c_interrupted_is_not_kept_alive(take_off):
    class Stops(Net):
        def forward(self, x):
            raise KeyboardInterrupt

    m, big = Stops().bfloat16(), x()
    alive = [weakref.ref(m), weakref.ref(big)]
    pins = dtypepin.apply(m, "^$")
    with contextlib.ExitStack() as block:
        if take_off == "block":
            block.enter_context(pins)
        with pytest.raises(KeyboardInterrupt):
            m(big)
        if take_off == "remove":
            pins.remove()
    del m, big, block
    gc.collect()
    assert [ref() for ref in alive] == [None, None]
