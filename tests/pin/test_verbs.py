"""apply, pin_dtype, select and unpin."""

import gc
from contextlib import suppress

import pytest
from torch import nn
from undone import F32, F64, Net, picture, x

import dtypepin
from dtypepin import PinError
from helpers import Seen

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
