"""Undo, nesting of pins, copies, handles. U1 to U7, N5 of the cases."""

import contextlib
import copy
import gc
import itertools
import logging
import pickle
import threading
import weakref
from contextlib import suppress

import pytest
import torch
from torch import nn

import dtypepin
from dtypepin import PinError
from helpers import Seen

BF16, F16, F32, F64 = torch.bfloat16, torch.half, torch.float32, torch.float64


def picture(model):
    """Everything that undo has to give back."""
    return {
        name: (
            set(part.__dict__),
            {k: type(v) for k, v in part.__dict__.items() if k.startswith("_")},
            [len(v) for k, v in part.__dict__.items() if k.endswith("hooks")],
            {k: (id(v), v.dtype, v.tolist()) for k, v in part.named_parameters(recurse=False)},
            {k: (v.dtype, v.tolist()) for k, v in part.named_buffers(recurse=False)},
            {k: v for k, v in part.__dict__.items() if not k.startswith("_")},
        )
        for name, part in model.named_modules()
    }


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.lin(x))

    def encode(self, x):
        return self.lin(x)


def x(dtype=BF16):
    return torch.randn(3, 4, dtype=dtype)


@pytest.mark.parametrize("override", [False, True])
@pytest.mark.parametrize("method", ["forward", "encode"])
def test_a_deep_copy_runs_its_own_weights(override, method):  # U1
    m = Net().bfloat16()
    dtypepin.apply(m, "", override_parameters=override, methods_to_override=[method, "forward"])
    twin = copy.deepcopy(m)
    with torch.no_grad():
        for value in twin.parameters():
            value.zero_()
    call = twin if method == "forward" else twin.encode
    assert call(x()).abs().max() == 0
    assert m(x()).abs().max() > 0
    assert dtypepin.unpin(twin) == (4 if method == "encode" else 3)
    assert "encode" not in twin.__dict__
    assert twin.lin.weight.dtype is BF16
    assert not twin.lin._forward_hooks
    assert m.lin._forward_hooks
    assert m.lin.weight.dtype is (F32 if override else BF16)
    assert twin(x()).dtype is BF16


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_copy_is_still_pinned(copier):  # U1, U2
    m = nn.Sequential(Seen(4)).bfloat16()
    dtypepin.apply(m, "0")
    twin = copier(copier(m))
    twin(x())
    assert twin[0].seen == [(F32, F32, F32)]
    assert dtypepin.unpin(twin) == 1
    assert picture(twin).keys() == picture(m).keys()


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


ERRORS = [
    {"patterns": "nothing"},
    {"patterns": "("},
    {"dtype": "int8"},
    {"inputs": "some"},
    {"output": "what"},
    {"override_parameters": 1},
    {"methods_to_override": ()},
    {"methods_to_override": [3]},
    {"methods_to_override": "encdoe"},
    {"methods_to_override": ["forward", "encdoe"]},
    {"methods_to_override": "__call__"},
]


@pytest.mark.parametrize("wrong", ERRORS, ids=str)
@pytest.mark.parametrize("verb", [dtypepin.apply, dtypepin.select])
def test_an_error_changes_nothing(wrong, verb):  # U7
    m = Net().bfloat16()
    before = picture(m)
    with pytest.raises(PinError):
        verb(m, **{"patterns": "", "override_parameters": True, **wrong})
    assert picture(m) == before


def test_an_error_in_the_middle_changes_nothing(monkeypatch):  # U7
    m = Net().bfloat16()
    before = picture(m)

    def fail(*_, **__):
        raise MemoryError("in the middle")

    monkeypatch.setattr(nn.BatchNorm1d, "register_forward_hook", fail)
    with pytest.raises(MemoryError, match="in the middle"):
        dtypepin.apply(m, "^(lin|norm)$", override_parameters=True)
    monkeypatch.undo()
    assert picture(m) == before


def test_one_that_cannot_be_removed_does_not_keep_the_others_on(monkeypatch):
    m = Net()
    pins = dtypepin.apply(m, "^(lin|norm)$")
    monkeypatch.setattr(pins[1]._pin.handles[0], "remove", lambda: 1 / 0)
    with pytest.raises(PinError, match="'norm': ZeroDivisionError"):
        pins.remove()
    assert not m.lin._forward_hooks


def test_modules_added_later_are_pinned_by_the_same_call():  # N5
    m = nn.Sequential(Seen(4)).bfloat16()
    first = dtypepin.apply(m, r"^\d$")
    m.append(Seen(4).bfloat16())
    second = dtypepin.apply(m, r"^\d$")
    m(x())
    assert m[0].seen == m[1].seen == [(F32, F32, F32)]
    assert [len(part._forward_hooks) for part in m] == [1, 1]
    second.remove()
    first.remove()
    assert [len(part._forward_hooks) for part in m] == [0, 0]


def test_children_added_to_a_pinned_parent_are_covered_by_the_same_call():  # N5
    m = nn.Sequential(Seen(4)).bfloat16()
    pins = dtypepin.apply(m, "^$")
    m.append(Seen(4).bfloat16())
    again = dtypepin.apply(m, "^$")
    m(x())
    assert m[1].seen == [(F32, F32, F32)]
    again.remove()
    pins.remove()
    assert type(m[1]._parameters) is type(nn.Linear(1, 1)._parameters)


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


def test_the_table(caplog):
    shared = nn.LayerNorm(4).bfloat16()
    m = nn.ModuleDict({"a": shared, "b": shared, "lin": nn.Linear(4, 4), "act": nn.GELU()})
    with caplog.at_level(logging.INFO, "dtypepin"):
        pins = dtypepin.apply(m, "a|lin|act", verbose=True)
    expected = (
        "name  class      method   dtype    parameters     aliases\n"
        "a     LayerNorm  forward  float32  cast per call  b\n"
        "lin   Linear     forward  float32  as they are    -\n"
        "act   GELU       forward  float32  none           -"
    )
    assert str(pins) == expected
    assert caplog.messages == [f"pinned 3 of ModuleDict:\n{expected}"]
    m["lin"](torch.ones(1, 4))
    assert str(pins).splitlines()[-1] == "not called so far: a, act"
    assert [pin.ran for pin in pins] == [False, True, False]
    assert str(dtypepin.select(m, "a|lin|act")) == expected
    pins[0].remove()
    assert str(pins).splitlines()[1].split()[4] == "removed"
    assert repr(pins[0]) == "PinHandle('a', LayerNorm, forward, float32, not active)"


def test_pins_are_a_sequence():
    pins = dtypepin.apply(Net(), "^(lin|norm)$")
    assert [pin.name for pin in pins] == ["lin", "norm"]
    assert list(pins[:1]) == [pins[0]]
    assert len(dtypepin.select(Net(), "lin")) == 1


def test_the_block_ends_the_pins_on_an_exception():
    m = Net()
    with pytest.raises(KeyboardInterrupt), dtypepin.pin_dtype(m, "lin"):
        raise KeyboardInterrupt
    assert not m.lin._forward_hooks


def test_one_block_object_can_be_entered_again():
    m = Net()
    block = dtypepin.pin_dtype(m, "lin")
    for _ in range(2):
        with block, block:
            assert len(m.lin._forward_hooks) == 1
        assert not m.lin._forward_hooks


def test_unpin_takes_everything_off_whoever_made_it():
    m = Net().bfloat16()
    before = picture(m)
    pins = dtypepin.apply(m, "", override_parameters=True)
    dtypepin.apply(m, "lin", dtype=F64)
    dtypepin.apply(m, "^$", methods_to_override="encode")
    assert dtypepin.unpin(m) == 5
    assert picture(m) == before
    pins.remove()
    assert picture(m) == before
    assert dtypepin.unpin(m) == 0


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


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("pattern", ["0", "none"])
def test_the_garbage_collector_is_left_as_it_was(pattern, enabled):
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with suppress(PinError):
            dtypepin.apply(nn.Sequential(nn.LayerNorm(4)), pattern).remove()
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()


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
