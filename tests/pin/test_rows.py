"""Pins as lines of a table."""

import logging

import torch
from torch import nn

import dtypepin


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
