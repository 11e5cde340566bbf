"""Pinned models through torch.export and torch.jit.trace."""

from __future__ import annotations

import contextlib
import copy
import warnings

import pytest
import torch
from torch import nn

import dtypepin
from dtypepin import PinError
from helpers import fullgraph

BF16, F32 = torch.bfloat16, torch.float32
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
STRICT = [
    False,
    pytest.param(
        True,
        marks=[
            pytest.mark.skipif(
                TORCH < (2, 13), reason="measured on torch 2.13 and 2.14; 2.4 cannot trace a hook"
            ),
            # torch tells about every list and attribute that is written while it traces.
            pytest.mark.filterwarnings("ignore:While compiling, we found certain:UserWarning"),
        ],
    ),
]


class Net(nn.Module):
    def __init__(self, autocast=False):
        super().__init__()
        self.stem, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))
        self.autocast = autocast

    def forward(self, x):
        if self.autocast:
            with torch.autocast("cpu", BF16):
                return self.block(self.stem(x))
        return self.block(self.norm(self.stem(x)))


def targets(program):
    graphs = [m for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    return [str(node.target) for graph in graphs for node in graph.graph.nodes]


@pytest.mark.parametrize("strict", STRICT)
@pytest.mark.parametrize("override", [False, True], ids=["cast", "stored"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_exported_equals_eager_and_has_no_autocast_in_it(strict, override, dtype):  # C4
    model, x = Net().eval().to(dtype), torch.randn(4, 8, dtype=dtype)
    plain = model(x)
    with dtypepin.apply(
        model, ["^norm$", "^block$"], dtype="float64", override_parameters=override
    ) as pins:
        expected = model(x)
        assert not torch.equal(expected, plain)
        program = torch.export.export(model, (x,), strict=strict)
        assert torch.equal(model(x), expected)  # exporting leaves the pins in order
        assert pins.check() == []
        # Still pinned: the program shares the model's Parameter objects.
        assert torch.equal(program.module()(x), expected)
    assert not [target for target in targets(program) if "autocast" in target]


@pytest.mark.parametrize("strict", STRICT)
@pytest.mark.parametrize("inside", [False, True], ids=["around", "in-forward"])
def test_export_under_autocast_is_refused(strict, inside):
    model, x = Net(autocast=inside).eval(), torch.randn(4, 8)
    pins = dtypepin.apply(model, "^block$")
    around = contextlib.nullcontext() if inside else torch.autocast("cpu", BF16)
    # Strict export goes through dynamo, which wraps the error in one of its own.
    with around, pytest.raises(Exception, match="outside of autocast") as caught:
        torch.export.export(model, (x,), strict=strict)
    assert strict or caught.type is PinError
    text = str(caught.value)
    for part in ("torch.export", "does not record", "'block'", "float32", "take the pin off"):
        assert part in text.replace("\\'", "'")
    with around, pins.disabled():
        torch.export.export(model, (x,), strict=False)  # without pins it is torch's own affair


@pytest.mark.skipif(TORCH < (2, 13), reason="torch 2.4 does not export nested autocast regions")
def test_export_with_autocast_switched_off_again_is_fine():
    model, x = Net().eval(), torch.randn(4, 8)
    dtypepin.apply(model, "^block$", dtype="float64")
    expected = model(x)
    with torch.autocast("cpu", BF16), torch.autocast("cpu", enabled=False):
        program = torch.export.export(model, (x,))
    assert torch.equal(program.module()(x), expected)


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("override", [False, True], ids=["cast", "stored"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_traced_equals_eager(dtype, override, autocast):  # C5
    model, x = Net().eval().to(dtype), torch.randn(4, 8, dtype=dtype)
    arguments = {"dtype": "float64", "override_parameters": override}
    dtypepin.apply(model, ["^norm$", "^block$"], **arguments)
    # A cast kept by autocast would be a constant in the trace, with or without pins.
    with torch.autocast("cpu", BF16, enabled=autocast, cache_enabled=False):
        expected = model(x)
        traced = torch.jit.trace(model, x)
    assert torch.equal(traced(x), expected)


@pytest.mark.parametrize("inside", [False, True], ids=["around", "in-forward"])
def test_a_trace_under_autocast_would_lose_the_pin_and_is_refused(inside):
    model, x = Net(autocast=inside).eval(), torch.randn(4, 8)
    pins = dtypepin.apply(model, "^block$")
    around = contextlib.nullcontext() if inside else torch.autocast("cpu", BF16)
    with around, pytest.raises(PinError, match=r"jit\.trace under an active autocast.*'block'"):
        torch.jit.trace(model, x)
    with around, pins.disabled():
        torch.jit.trace(model, x, check_trace=False)


def test_script_modules_cannot_be_pinned():  # C5
    scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
    for model, pattern in ((scripted, "^1$"), (scripted, "^$"), (nn.Sequential(scripted), "^0$")):
        with pytest.raises(PinError, match="ScriptModule"):
            dtypepin.apply(model, pattern)
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert scripted(torch.randn(2, 8)).dtype is F32


@fullgraph
@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_batch_norm_keeps_its_statistics(strict):
    m, x = nn.Sequential(nn.BatchNorm1d(4)).bfloat16(), torch.randn(8, 4).bfloat16()
    twin = copy.deepcopy(m)
    for one in (m, twin):
        dtypepin.apply(one, "0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of side effects on our stack of regions
        exported = torch.export.export(m, (x,), strict=strict).module()
    assert torch.equal(exported(x), twin(x))
    assert twin[0].running_mean.any()
    for name, value in twin.state_dict().items():
        assert torch.equal(exported.state_dict()[name], value)
