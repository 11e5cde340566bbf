"""Checked by mypy --strict, never run: the types that users write."""

import re
from contextlib import AbstractContextManager

import torch
from torch import nn
from typing_extensions import assert_type

import dtypepin
from dtypepin import PinError, PinHandle, PinHandles, PinWarning, Selection, pin_dtype
from dtypepin.trainers import DtypeOverrider

model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))

pins = dtypepin.apply(
    model,
    ["norm", re.compile("head")],
    class_patterns="LayerNorm",
    dtype=torch.float32,
    methods_to_override=("forward", "encode"),
    override_parameters=True,
    inputs="all",
    output="keep",
    verbose=True,
)
assert_type(pins, PinHandles)
assert_type(pins[0], PinHandle)
assert_type(pins[0].name, str)
assert_type(pins[0].names, tuple[str, ...])
assert_type(pins[0].module, nn.Module | None)
assert_type(pins[0].ran, bool)
assert_type(pins[0].dtype, torch.dtype)
assert_type(pins.check(), list[str])
assert_type(pins.disabled(), AbstractContextManager[None])
assert_type(pins.remove(), None)
assert_type([pin.class_name for pin in pins], list[str])

with pin_dtype(model, patterns=[r"norm"], dtype="bf16", output=torch.float64) as scoped:
    assert_type(scoped, PinHandles)
with dtypepin.apply(model, r"norm") as scoped:
    assert_type(scoped, PinHandles)

selection = dtypepin.select(model, "norm")
assert_type(selection, Selection)
assert_type(selection.names, list[str])
assert_type(selection[0].parameters, str)
assert_type(dtypepin.unpin(model), int)

hook = DtypeOverrider(class_patterns=["LayerNorm"], dtype="float32", check_interval=10)
assert_type(hook.before_train(), None)
assert_type(hook.pins, PinHandles | None)

error: ValueError = PinError("x")
warning: UserWarning = PinWarning("x")
