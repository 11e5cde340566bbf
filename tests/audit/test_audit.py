"""What an audit sees and how it judges pins. N1, N3, O3 of the cases."""

import copy
import gc
import json
import pickle
import random
import threading
import warnings
import weakref
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import dtypepin
from dtypepin import PinError
from dtypepin._audit import nonfinite
from dtypepin._pin import frames, hooks

BF16, F16, F32 = torch.bfloat16, torch.half, torch.float32


def x(dtype=BF16, features=4):
    return torch.randn(3, features, dtype=dtype)


def verdicts(report):
    return {pin.name: (pin.verdict, pin.detail) for pin in report.pins}


def row(report, name):
    (found,) = [module for module in report.modules if module.name == name]
    return found


def left_behind(model):
    """Everything that an audit must give back."""
    return (
        [list(part.__dict__) for part in model.modules()],
        [len(v) for part in model.modules() for k, v in part.__dict__.items() if "hooks" in k],
        {
            k: list(v)
            for k, v in vars(torch_module).items()
            if k.startswith("_global_") and "hooks" in k
        },
        len(_get_current_dispatch_mode_stack()),
        {key: value.tolist() for key, value in model.state_dict().items()},
        torch.get_rng_state().tolist(),
        nonfinite.quiet.on,
        list(frames.thread.disabled),
    )


class OwnAutocast(nn.Linear):
    def forward(self, x):
        with torch.autocast("cpu", BF16):
            return super().forward(x)


class CallsForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.softmax = nn.LayerNorm(4), nn.Softmax(-1)

    def forward(self, x):
        return self.softmax.forward(self.norm.forward(x))


# What modules computed in.


def test_what_the_modules_of_a_model_computed_in():
    m = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Flatten())
    with dtypepin.audit(m) as report, torch.autocast("cpu", BF16):
        m(x(F32))
    assert [module.name for module in report.modules] == ["", "0", "1", "2"]
    linear, norm, flatten = report.modules[1:]
    assert (linear.dtype_in, linear.compute, linear.dtype_out) == (
        ["float32"],
        {"bfloat16": 1},
        ["bfloat16"],
    )
    assert (norm.dtype_in, list(norm.compute), norm.dtype_out) == (
        ["bfloat16"],
        ["float32"],
        ["bfloat16"],
    )
    assert flatten.compute == {}
    assert flatten.calls == 1
    assert report.modules[0].compute == {}  # its children compute, not it


def test_the_dtype_in_is_what_came_and_the_dtype_out_is_what_left():
    m = nn.Sequential(nn.Linear(4, 4)).bfloat16()
    with dtypepin.pin_dtype(m, "0"), dtypepin.audit(m) as report:
        m(x())
    linear = row(report, "0")
    assert (linear.dtype_in, linear.compute, linear.dtype_out) == (
        ["bfloat16"],
        {"float32": 1},
        ["bfloat16"],
    )
    with dtypepin.pin_dtype(m, "0", output="keep"), dtypepin.audit(m) as report:
        m(x())
    assert row(report, "0").dtype_out == ["float32"]


def test_keyword_inputs_are_seen_before_they_are_cast():
    class Keywords(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, *, x, scale):
            return self.lin(x) * scale

    m = Keywords().bfloat16()
    with dtypepin.pin_dtype(m, "^$", inputs="all"), dtypepin.audit(m) as report:
        m(x=x(), scale=x(F16))
    assert row(report, "").dtype_in == ["bfloat16", "float16"]
    assert verdicts(report)[""][0] == "honoured"


def test_shared_modules_and_recursion():
    class Recurs(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = self.b = nn.Linear(4, 4)

        def forward(self, x, depth=2):
            return self(x, depth - 1) if depth else self.b(self.a(x))

    m = Recurs().bfloat16()
    with dtypepin.pin_dtype(m, "^$"), dtypepin.audit(m) as report:
        m(x())
    assert [(r.name, r.calls) for r in report.modules] == [("", 3), ("a", 2)]
    assert report.pins[0].calls == 3
    assert verdicts(report) == {"": ("honoured", "")}


def test_a_whole_training_step():
    m = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).bfloat16()
    optimizer = torch.optim.Adam(m.parameters())
    with dtypepin.pin_dtype(m, "1"), dtypepin.audit(m) as report:
        m(x()).sum().backward()
        optimizer.step()
    assert verdicts(report) == {"1": ("honoured", "")}
    assert row(report, "1").calls == 1
    assert list(row(report, "1").compute) == ["float32"]  # the backward is out of scope


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_computes_again_is_counted_apart(reentrant):
    m = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).bfloat16()
    with dtypepin.pin_dtype(m, "1"), dtypepin.audit(m) as report:
        checkpoint(m, x().requires_grad_(), use_reentrant=reentrant).sum().backward()
    assert [(r.name, r.calls, r.recomputed) for r in report.modules] == [
        ("", 1, 1),
        ("0", 1, 1),
        ("1", 1, 1),
    ]
    assert report.pins[0].calls == 2
    assert verdicts(report) == {"1": ("honoured", "")}
    assert "1 (1 again)" in str(report)


def test_only_the_thread_that_entered_is_recorded():
    m = nn.Sequential(nn.Linear(4, 4)).bfloat16()
    with dtypepin.audit(m) as report:
        thread = threading.Thread(target=m, args=(x(),))
        thread.start()
        thread.join()
    assert report.modules == []
    assert str(report) == "no module of the model was called"


def test_a_compiled_model_is_refused_where_it_cannot_run_eagerly(monkeypatch):
    monkeypatch.delattr(torch.compiler, "set_stance", raising=False)
    m = nn.Sequential(nn.Linear(4, 4))
    m.compile(backend="eager")
    for compiled in (m, torch.compile(nn.Sequential(nn.Linear(4, 4)), backend="eager")):
        with pytest.raises(PinError, match="got a compiled one"), dtypepin.audit(compiled):
            pass


@pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="torch 2.4 has no stance")
def test_a_compiled_model_runs_eagerly_and_it_is_said():
    def backend(graph, _):
        def run(*args):
            ran.append(True)
            return graph.forward(*args)

        return run

    m, ran = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).bfloat16(), []
    compiled = torch.compile(m, backend=backend)
    compiled(x())
    assert ran.pop()
    filters = list(warnings.filters)
    with dtypepin.pin_dtype(m, "1"):
        for audited in (m, compiled):
            with dtypepin.audit(audited) as report:
                compiled(x())
            assert verdicts(report) == {"1": ("honoured", "")}
            assert report.notes == ["compiled code ran eagerly for this audit"]
    assert not ran
    assert list(warnings.filters) == filters
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compiled(x())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    with dtypepin.audit(nn.Linear(4, 4)) as report:
        pass
    assert report.notes == []


def test_wrapped_in_ddp(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        m = nn.parallel.DistributedDataParallel(
            nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).bfloat16()
        )
        with dtypepin.pin_dtype(m, "^1$"), dtypepin.audit(m) as report:
            m(x()).sum().backward()
        assert verdicts(report) == {"1": ("honoured", "")}
        assert [r.name for r in report.modules] == ["", "0", "1"]
    finally:
        torch.distributed.destroy_process_group()


def test_several_processes_do_not_run_a_forward_twice(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    m = nn.Sequential(nn.LayerNorm(4))
    pins = dtypepin.apply(m, "0")
    with dtypepin.audit(m) as report:
        m(x(F32))
    assert verdicts(report)["0"] == ("honoured", "")  # it has no effect, but who knows
    assert report.notes == ["several processes take part: 'no effect' was not measured"]
    monkeypatch.undo()
    pins.remove()


# Verdicts.


def test_a_pin_that_is_honoured():
    m = nn.Sequential(nn.Linear(4, 4)).bfloat16()
    with dtypepin.pin_dtype(m, "0"), dtypepin.audit(m) as report:
        m(x())
    assert verdicts(report) == {"0": ("honoured", "")}
    report.assert_honoured()


class Modulated(nn.Module):
    """The norm of diffusers' Sana: scale and shift come in beside what they act on."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x, scale, shift=None):
        return self.norm(x) * (1 + scale) + (scale if shift is None else shift)


def test_partly_says_so_where_other_inputs_were_not_cast():
    m = nn.ModuleDict({"norm": Modulated(), "own": OwnAutocast(4, 4)}).bfloat16()
    said = 'other floating inputs were left in bfloat16: inputs="all" would cast them too'
    with dtypepin.pin_dtype(m, ["^norm$", "own"]), dtypepin.audit(m) as report:
        m["norm"](x(), x(), shift=x())
        m["own"](x())
    assert verdicts(report) == {
        "norm": ("partly", f"add ran in bfloat16; {said}"),
        "own": ("partly", "addmm ran in bfloat16"),
    }
    with dtypepin.pin_dtype(m, "norm$", inputs="all"), dtypepin.audit(m) as report:
        m["norm"](x(), x(), shift=x())
    assert {pin.verdict for pin in report.pins} == {"honoured"}


def test_a_module_with_an_autocast_of_its_own_is_honoured_partly():
    m = nn.Sequential(OwnAutocast(4, 4))
    with dtypepin.pin_dtype(m, "0"), dtypepin.audit(m) as report:
        m(x(F32))
    assert verdicts(report) == {"0": ("partly", "addmm ran in bfloat16")}
    with pytest.raises(PinError, match=r"(?s)1 of 1 pins were not honoured\n\npin .*addmm ran in"):
        report.assert_honoured()


@pytest.mark.parametrize("autocast", [False, True])
def test_a_pin_without_effect(autocast):
    m = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    with (
        dtypepin.pin_dtype(m, "[01]"),
        dtypepin.audit(m) as report,
        torch.autocast("cpu", BF16, enabled=autocast),
    ):
        m(x(F32))
    no_effect = ("no effect", "it computes in float32 without pins too")
    assert verdicts(report) == {"0": no_effect, "1": ("honoured", "") if autocast else no_effect}
    report.assert_honoured()  # it did compute in float32


def test_a_pin_on_what_computes_nothing():
    m = nn.Sequential(nn.Flatten()).bfloat16()
    with dtypepin.pin_dtype(m, "0"), dtypepin.audit(m) as report:
        m(x())
    assert verdicts(report) == {"0": ("no effect", "it computes nothing in floating point")}


@pytest.mark.parametrize("override", [False, True])
def test_pins_inside_pins_are_judged_as_if_there_were_none(override):
    m = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))).bfloat16()
    with dtypepin.pin_dtype(m, "", override_parameters=override), dtypepin.audit(m) as report:
        m(x())
    assert {verdict for verdict, _ in verdicts(report).values()} == {"honoured"}
    assert len(report.pins) == 4


def test_a_weight_that_a_parent_reads():  # N1
    m = nn.ModuleDict({"mha": nn.MultiheadAttention(4, 2)}).bfloat16()
    with dtypepin.pin_dtype(m, "out_proj"), dtypepin.audit(m) as report:
        m["mha"](x(), x(), x())
    assert verdicts(report) == {
        "mha.out_proj": ("never ran", "'mha' reads its weight and does not call it: pin that one")
    }
    with pytest.raises(PinError, match="'mha' reads its weight"):
        report.assert_honoured()


def test_a_module_that_is_called_through_forward():  # N3
    m = nn.ModuleDict({"parent": CallsForward()}).bfloat16()
    with dtypepin.pin_dtype(m, "norm|softmax"), dtypepin.audit(m) as report:
        m["parent"](x())
    why = ("never ran", "called through .forward() by 'parent': call the module itself")
    assert verdicts(report) == {"parent.norm": why, "parent.softmax": why}


def test_another_method_ran():
    class Coder(nn.Linear):
        def encode(self, x):
            return nn.functional.linear(x, self.weight)

    m = Coder(4, 4).bfloat16()
    with dtypepin.pin_dtype(m, "^$"), dtypepin.audit(m) as report:
        m.encode(x())
    assert verdicts(report)[""][0] == "never ran"
    with dtypepin.pin_dtype(m, "^$", methods_to_override="encode"), dtypepin.audit(m) as report:
        m.encode(x())
        m.encode(x())
    assert (report.pins[0].method, report.pins[0].calls) == ("encode", 2)
    assert verdicts(report) == {"": ("honoured", "")}
    parent = nn.Sequential(m)
    parent.forward = lambda x: m.encode(x)
    with dtypepin.pin_dtype(parent, "^0$"), dtypepin.audit(parent) as report:
        parent(x())
    assert verdicts(report) == {
        "0": ("never ran", "its 'encode' ran: pin it with methods_to_override")
    }


def test_a_module_that_was_not_called_or_is_gone():
    m = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    pins = dtypepin.apply(m, "[12]")
    with dtypepin.audit(m) as report:
        m[2] = nn.Identity()
        m[0](x())
    assert verdicts(report) == {
        "1": ("never ran", "its module was not called"),
        "2": ("never ran", "its module has left the model"),
    }
    pins.remove()


def test_pins_that_are_switched_off():
    m = nn.Sequential(nn.Linear(4, 4)).bfloat16()
    with dtypepin.pin_dtype(m, "0") as pins, dtypepin.audit(m) as report, pins.disabled():
        m(x())
    assert verdicts(report) == {"0": ("never ran", "switched off by disabled()")}


def test_a_pin_that_is_made_inside_the_block():
    m = nn.Sequential(nn.Linear(4, 4)).bfloat16()
    with dtypepin.audit(m) as report, dtypepin.pin_dtype(m, "0"):
        m(x())
    assert verdicts(report) == {"0": ("honoured", "")}


def test_what_is_stored_is_told_of_pins_that_are_off_in_the_end():
    m = nn.Sequential(nn.Linear(4, 4)).bfloat16()
    with dtypepin.audit(m) as report, dtypepin.pin_dtype(m, "0", override_parameters=True):
        m(x())
    assert report.pins[0].stored_bytes == 40  # two bytes more for each of 20


def test_modules_that_are_added_inside_the_block_are_named():
    m = nn.Sequential(nn.Linear(4, 4))
    with dtypepin.audit(m) as report:
        m.append(nn.Linear(4, 4))
        m(x(F32))
    assert report.notes == ["added to the model inside the block, so not looked at: '1'"]


def test_no_pin_is_not_honoured():
    m = nn.Sequential(nn.Linear(4, 4))
    with dtypepin.audit(m) as report:
        m(x(F32))
    with pytest.raises(PinError, match="there was no pin to honour"):
        report.assert_honoured()


def test_a_pin_that_an_overflowing_layer_feeds():
    m = nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4)).half()
    nn.init.ones_(m[0].weight)
    with dtypepin.pin_dtype(m, "1"), dtypepin.audit(m) as report:
        m(torch.full((1, 4), 30000.0, dtype=F16))
    assert verdicts(report) == {"1": ("input already non-finite", "first produced by '0'")}
    assert report.first_bad == "first bad value: the output of '0', its input finite"
    assert (row(report, "0").nonfinite_in, row(report, "0").nonfinite_out) == (0, 1)
    assert (row(report, "1").nonfinite_in, row(report, "1").nonfinite_out) == (1, 1)
    with dtypepin.pin_dtype(m, "0"), dtypepin.audit(m) as report:
        m(torch.full((1, 4), float("nan"), dtype=F16))
    assert verdicts(report) == {
        "0": ("input already non-finite", "it comes from outside the model")
    }
    assert report.first_bad == "first bad value: the output of '0', its input already not finite"


def test_an_infinite_mask_is_no_fault():
    class Masked(nn.Module):
        def forward(self, x, mask):
            return (x + mask).softmax(-1)

    m = nn.ModuleDict({"a": Masked()}).bfloat16()
    mask = torch.full((3, 4), float("-inf"), dtype=BF16).triu(2)
    with dtypepin.pin_dtype(m, "a", inputs="all"), dtypepin.audit(m) as report:
        m["a"](x(), mask)
    assert verdicts(report) == {"a": ("honoured", "")}
    assert row(report, "a").nonfinite_in == 0
    assert report.first_bad == ""
    with dtypepin.audit(m) as report:
        m["a"](x(), mask - 1)  # no mask: -inf beside other numbers
    assert row(report, "a").nonfinite_in == 1


def test_a_cast_back_that_overflows():  # O3
    m = nn.Sequential(nn.Linear(4, 1, bias=False)).half()
    nn.init.ones_(m[0].weight)
    big = torch.full((1, 4), 20000.0, dtype=F16)
    with dtypepin.pin_dtype(m, "0"), dtypepin.audit(m) as report:
        assert m(big).isinf()
    assert row(report, "0").overflowed == 1
    assert report.first_bad == (
        "first bad value: the output of '0', its input finite, "
        "and float32 before the pin cast it back"
    )
    too_large = "its output is too large for float16, which it is cast back to"
    assert verdicts(report) == {"0": ("honoured", too_large)}
    with dtypepin.pin_dtype(m, "0", output="keep"), dtypepin.audit(m) as report:
        assert m(big).item() == 80000
    assert row(report, "0").overflowed == 0
    assert report.first_bad == ""
    with dtypepin.pin_dtype(m, "0", dtype="float16"), dtypepin.audit(m) as report:
        m(torch.full((1, 4), 1e6))
    assert verdicts(report) == {"0": ("honoured", "what goes in is too large for float16")}


def test_a_cast_back_of_another_method_that_overflows():  # O3
    class Coder(nn.Linear):
        def encode(self, x):
            return self.inner(x)

    m = nn.ModuleDict({"vae": Coder(1, 1)}).half()
    m["vae"].inner = nn.Linear(4, 1, bias=False).half()
    nn.init.ones_(m["vae"].inner.weight)
    big = torch.full((1, 4), 20000.0, dtype=F16)
    dtypepin.apply(m, "vae$", methods_to_override="encode")
    with dtypepin.audit(m) as report:
        assert m["vae"].encode(big).isinf()
    too_large = "its output is too large for float16, which it is cast back to"
    assert verdicts(report) == {"vae": ("honoured", too_large)}
    assert report.pins[0].calls == 1
    assert report.first_bad == (
        "first bad value: the output of 'vae.encode', finite before the pin cast it back to float16"
    )


def test_what_pins_store_and_cast():
    m = nn.Sequential(nn.Linear(4, 4)).bfloat16()
    with dtypepin.pin_dtype(m, "0"), dtypepin.audit(m) as report:
        m(x())
        m(x())
    inputs, weights, outputs = 3 * 4 * 4, 20 * 4, 3 * 4 * 2
    assert (report.pins[0].stored_bytes, report.pins[0].cast_bytes) == (
        0,
        inputs + weights + outputs,
    )
    with (
        dtypepin.pin_dtype(m, "0", override_parameters=True, inputs="all"),
        dtypepin.audit(m) as report,
    ):
        m(x())
    assert (report.pins[0].stored_bytes, report.pins[0].cast_bytes) == (20 * 2, inputs + outputs)


def test_time_is_there_on_request_and_marked():
    m = nn.Sequential(nn.Linear(4, 4))
    with dtypepin.audit(m, timing=True) as report:
        m(x(F32))
    assert row(report, "").seconds >= row(report, "0").seconds > 0
    assert report.notes == ["times are disturbed by the measuring; compare them, no more"]
    assert str(report).splitlines()[0].endswith("  ms")


# It changes nothing and leaves nothing behind.


class Moody(nn.Module):
    """Draws random numbers, writes buffers and attributes, and grows a list."""

    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(4), nn.Dropout()
        self.calls, self.history = 0, []

    def forward(self, x, cache=None):
        self.calls += 1
        self.history.append(self.calls)
        if cache is not None:
            cache.seen.append(x)
        return self.dropout(self.norm(x))


def test_the_extra_run_is_not_noticed():
    outs, states = [], []
    for audited in (False, True):
        torch.manual_seed(0)
        m, cache = Moody().bfloat16(), SimpleNamespace(seen=[])
        dtypepin.apply(m, "^$")
        if audited:
            with dtypepin.audit(m) as report:
                outs.append(m(x(), cache))
            assert verdicts(report) == {"": ("honoured", "")}
        else:
            outs.append(m(x(), cache))
        assert (m.calls, m.history, len(cache.seen)) == (1, [1], 1)
        states.append((m.norm.running_mean, m.norm.num_batches_tracked, torch.rand(1)))
    assert torch.equal(*outs)
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_a_module_that_cannot_be_copied_is_honoured_unmeasured():
    m = nn.Sequential(nn.LayerNorm(4))
    m[0].lock = threading.Lock()
    with dtypepin.pin_dtype(m, "0"), dtypepin.audit(m) as report:
        m(x(F32))
    assert verdicts(report) == {"0": ("honoured", "")}
    assert report.notes == ["'no effect' could not be measured: '0'"]


class Restless(nn.Module):
    """Writes to its parameters, draws random numbers, and learns in its forward."""

    def __init__(self):
        super().__init__()
        self.weight, self.steps = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        with torch.enable_grad():
            (x * self.weight).sum().backward()
        with torch.no_grad():
            self.steps.add_(1)
        return x * self.steps + torch.rand(4) + random.random() + np.random.rand()


def test_parameters_gradients_and_other_random_numbers_survive_the_extra_run():
    outs = []
    for audited in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        m = nn.Sequential(Restless())
        with dtypepin.pin_dtype(m, "0"), ExitStack() as stack:
            if audited:
                report = stack.enter_context(dtypepin.audit(m))
            out = m(torch.ones(4))
        outs.append((out.tolist(), m[0].steps.tolist(), m[0].weight.grad.tolist()))
    assert verdicts(report)["0"][0] == "no effect"
    assert outs[0] == outs[1]


def test_it_is_measured_again_under_other_circumstances():
    m, value = nn.Sequential(nn.Linear(4, 4)), x(F32)
    for order in ((False, True), (True, False)):
        with dtypepin.pin_dtype(m, "0"), dtypepin.audit(m) as report:
            for on in order:
                with torch.autocast("cpu", BF16, enabled=on):
                    m(value)
        assert verdicts(report) == {"0": ("honoured", "")}


def test_an_inner_pin_that_the_extra_run_did_not_reach_is_said_to_be_unmeasured():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return self.a(x) if self.calls == 1 else self.b(x)

    m = nn.ModuleDict({"s": Sometimes()})
    with dtypepin.pin_dtype(m, [r"^s$", "b"]), dtypepin.audit(m) as report:
        m["s"](x(F32))
        m["s"](x(F32))
    assert verdicts(report)["s.b"] == ("honoured", "")
    assert report.notes == ["'no effect' could not be measured: 's.b'"]


def test_an_extra_run_that_fails_says_nothing_but_dtypes_that_clash_do():
    class Force(nn.Linear):
        def forward(self, x):
            if not nonfinite.quiet.on and fails and self.weight.dtype is x.dtype is BF16:
                raise ValueError("only where it is not pinned")
            (grad,) = torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)
            return grad

    fails = False
    m, value = nn.Sequential(Force(4, 1)), x(F32).requires_grad_()
    with dtypepin.pin_dtype(m, "0"), dtypepin.audit(m) as report:
        m(value)
    assert verdicts(report)["0"][0] == "no effect"  # gradients are there in it as well
    fails = True
    with dtypepin.pin_dtype(m.bfloat16(), "0"), dtypepin.audit(m) as report:
        m(x().requires_grad_())
    assert verdicts(report)["0"][0] == "honoured"
    assert report.notes == ["'no effect' could not be measured: '0'"]
    m = nn.Sequential(nn.Linear(4, 4)).bfloat16()
    with dtypepin.pin_dtype(m, "0"), dtypepin.audit(m) as report:
        m(x(F32))
    assert verdicts(report)["0"] == ("honoured", "")
    assert report.notes == []


def test_hooks_of_the_user_run_in_the_extra_run():
    m = nn.Sequential(nn.Softmax(-1))
    m[0].register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
    with dtypepin.pin_dtype(m, "0"), dtypepin.audit(m) as report:
        m(x(F32))
    assert verdicts(report) == {"0": ("honoured", "")}
    assert report.notes == []


@pytest.mark.parametrize(
    ("module", "dtype", "output", "verdict"),
    [
        (nn.Embedding(4, 4), "float16", "restore", "honoured"),  # rounds its weight
        (nn.Embedding(4, 4).bfloat16(), "float32", "restore", "no effect"),
        (nn.Embedding(4, 4).bfloat16(), "float32", "keep", "honoured"),
        (nn.Embedding(4, 4), "float32", "keep", "no effect"),
    ],
)
def test_casts_alone_are_an_effect_where_something_changes(module, dtype, output, verdict):
    m = nn.Sequential(module)
    with dtypepin.pin_dtype(m, "0", dtype=dtype, output=output), dtypepin.audit(m) as report:
        m(torch.arange(4))
    assert verdicts(report)["0"][0] == verdict


def test_pins_that_come_and_go_inside_the_block():
    m = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).bfloat16()
    counts = []
    with dtypepin.audit(m) as report:
        with dtypepin.pin_dtype(m, "1"):
            pass
        for _ in range(3):
            with dtypepin.pin_dtype(m, "1"):
                m(x())
            counts.append(len(m[1]._forward_pre_hooks))
    (pin,) = report.pins
    assert (pin.verdict, pin.calls, pin.cast_bytes) == ("honoured", 3, 2 * 4 * 4 + 3 * 4 * (4 + 2))
    assert counts == [1, 1, 1]
    assert not m[1]._forward_pre_hooks
    m.float()
    with dtypepin.audit(m) as report, dtypepin.pin_dtype(m, "1"):
        m(x(F32))
    assert verdicts(report) == {"1": ("no effect", "it computes in float32 without pins too")}
    assert not hooks.watchers


def test_copies_made_inside_the_block_carry_no_recorder():
    m = nn.Sequential(nn.LayerNorm(4)).bfloat16()
    with dtypepin.pin_dtype(m, "0"), dtypepin.audit(m) as report:
        before = copy.deepcopy(m)
        m(x())
        after = copy.deepcopy(m)
        loaded = pickle.loads(pickle.dumps(m))
        for twin in (before, after, loaded):
            assert twin(x()).dtype is BF16
            assert len(list(hooks.on(twin[0]))) == 1
    assert [pin.calls for pin in report.pins] == [1]
    for twin in (before, after, loaded):
        twin(x())


def test_inputs_are_not_kept():
    m, value = nn.Sequential(nn.LayerNorm(4)).bfloat16(), x()
    alive = weakref.ref(value)
    with dtypepin.pin_dtype(m, "0"), dtypepin.audit(m):
        m(value)
        del value
        gc.collect()
        assert alive() is None


def test_a_pin_that_runs_in_another_thread_only_is_not_called_honoured():
    m = nn.Sequential(OwnAutocast(4, 4))
    with dtypepin.pin_dtype(m, "0"), dtypepin.audit(m) as report:
        thread = threading.Thread(target=m, args=(x(F32),))
        thread.start()
        thread.join()
    other = "only in another thread, which is not recorded"
    assert verdicts(report) == {"0": ("never ran", other)}


def test_of_tied_weights_the_other_owner_is_not_to_blame():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids):
            return self.embedding(ids)

    m = Tied()
    with dtypepin.pin_dtype(m, "head"), dtypepin.audit(m) as report:
        m(torch.arange(4))
    assert verdicts(report) == {"head": ("never ran", "its module was not called")}


def test_a_bad_value_of_another_tower_is_not_blamed_for_the_first():
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, y):
            return self.a(x), self.b(y)

    m = Towers()
    nn.init.constant_(m.b.weight, 3e38)
    with dtypepin.audit(m) as report:
        m(torch.full((1, 4), float("nan")), torch.ones(1, 4))
    assert report.first_bad == "first bad value: the output of 'a', its input already not finite"


@pytest.mark.parametrize(
    "move",
    [
        lambda x, y: x + y.nonzero().sum(),
        lambda x, y: x + y.any(),
        lambda x, y: x + y.signbit(),
        lambda x, y: x + y.argmax(),
        lambda x, y: x + y.masked_select(y > 0).numel(),
        lambda x, y: x + nn.functional.pad(y[None], (1, 1), mode="reflect").numel(),
        lambda x, y: x + y.diag_embed().numel(),
        lambda x, y: x + y.unique().numel(),
    ],
)
def test_moves_comparisons_and_searches_are_no_computing(move):
    class Moves(nn.Module):
        def forward(self, x, y):
            return move(x, y)

    m = nn.ModuleDict({"m": Moves()})
    with dtypepin.pin_dtype(m, "m"), dtypepin.audit(m) as report:
        m["m"](x(), x(features=4))
    assert verdicts(report) == {"m": ("honoured", "")}


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage")
def test_nested_tensors():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    m = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[0, 3:] = True
    with torch.no_grad(), dtypepin.audit(m) as report:
        out = m(torch.ones(3, 5, 4), src_key_padding_mask=mask)
    assert out.dtype is F32
    assert report.first_bad == ""


def test_without_the_extra_run():
    m = nn.Sequential(nn.LayerNorm(4))
    with dtypepin.pin_dtype(m, "0"), dtypepin.audit(m, without_pins=False) as report:
        m(x(F32))
    assert verdicts(report) == {"0": ("honoured", "")}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("where", ["block", "module", "extra run"])
def test_nothing_is_left_behind(error, where):
    class Fails(nn.Linear):
        def forward(self, x):
            if where == "module" or (where == "extra run" and x.dtype is BF16):
                raise error
            return super().forward(x)

    m = nn.Sequential(nn.Linear(4, 4), Fails(4, 4)).bfloat16()
    value = x()
    before = left_behind(m)
    pins = dtypepin.apply(m, "1")
    try:
        with dtypepin.audit(m) as report:
            m(value)
            if where == "block":
                raise error
    except error:
        assert where != "extra run" or error is not ValueError
    pins.remove()
    assert left_behind(m) == before
    frames.current()
    assert not frames.thread.frames
    assert {r.name for r in report.modules} >= {"", "0", "1"}
    with dtypepin.audit(m) as report:
        m[0](value)
    assert [r.name for r in report.modules] == ["0"]


def test_an_exception_that_is_caught_inside_the_block():
    class Fails(nn.Linear):
        def forward(self, x):
            raise ValueError("no")

    m = nn.ModuleDict({"bad": Fails(4, 4), "good": nn.Linear(4, 4)}).bfloat16()
    with dtypepin.pin_dtype(m, "good"), dtypepin.audit(m) as report:
        with pytest.raises(ValueError, match=r"^no$"):
            m["bad"](x())
        x() + 1  # an op outside of all modules
        m["good"](x())
    assert row(report, "good").compute == {"float32": 1}
    assert row(report, "bad").compute == {}
    assert verdicts(report) == {"good": ("honoured", "")}


def test_nested_audits_see_the_same_and_not_each_other():
    m = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).bfloat16()
    with dtypepin.pin_dtype(m, "1"), dtypepin.audit(m) as outer:
        with dtypepin.audit(m) as inner:
            m(x())
        m(x())
    with dtypepin.pin_dtype(m, "1"), dtypepin.audit(m) as plain:
        m(x())
    assert inner.to_dict() == plain.to_dict()
    assert [r.calls for r in outer.modules] == [2, 2, 2]
    assert row(outer, "1").compute == {"float32": 2 * row(plain, "1").compute["float32"]}
    assert verdicts(outer) == verdicts(plain)


def test_ran_is_what_it_was():
    m = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    pins = dtypepin.apply(m, "[01]")
    m[0](x())
    with dtypepin.audit(m) as report:
        m[1](x())
    assert [pin.ran for pin in pins] == [True, True]
    assert verdicts(report)["0"][0] == "never ran"


def test_a_report_keeps_no_model_alive():
    import gc
    import weakref

    m = nn.Sequential(nn.Linear(4, 4))
    dtypepin.apply(m, "0")
    with dtypepin.audit(m) as report:
        m(x())
    alive = weakref.ref(m)
    del m
    gc.collect()
    assert alive() is None
    assert len(report.modules) == 2


def test_the_fast_path_of_an_encoder_layer_stays_in_use():
    m = nn.TransformerEncoderLayer(4, 2, batch_first=True).eval()
    value = torch.randn(1, 3, 4)
    with dtypepin.audit(m) as report, torch.no_grad():
        m(value)
    assert [r.name for r in report.modules] == [""]  # it calls no child there


# Reports.


def mixed_report():
    """One of each verdict."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.parent = CallsForward()
            self.own, self.norm = OwnAutocast(4, 4), nn.LayerNorm(4)
            self.lin, self.head = nn.Linear(4, 4).half(), nn.LayerNorm(4)

        def forward(self, x):
            x = self.norm(self.own(self.parent(x)))
            return self.head(self.lin(x.half() * 1e5))

    m = Model()
    nn.init.ones_(m.lin.weight)
    patterns = [r"^parent\.norm", "own", "^norm", "lin", "head"]
    pins = dtypepin.apply(m, patterns)
    with dtypepin.audit(m) as report:
        m(torch.ones(2, 4))
    pins.remove()
    return report


def test_the_printed_table(golden):
    report = mixed_report()
    golden("audit.txt", str(report))
    golden("audit.md", report.to_markdown().rstrip("\n"))


def test_plain_data(tmp_path):
    report = mixed_report()
    data = report.to_dict()
    report.to_json(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == data
    assert list(data) == ["first_bad", "pins", "modules", "notes"]
    data["pins"][0]["name"] = data["modules"][0]["dtype_in"] = "mine"
    assert report.to_dict()["pins"][0]["name"] != "mine"  # it is no view
    assert report.to_dict()["modules"][0]["dtype_in"] == ["float32"]
    assert pickle.loads(pickle.dumps(report)).to_dict() == report.to_dict()
    assert repr(report) == "AuditReport(5 pins, 6 modules)"


def test_two_reports_compared():
    m = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    reports = []
    for model in (m, copy.deepcopy(m).bfloat16()):
        with dtypepin.pin_dtype(model, "1"), dtypepin.audit(model) as report:
            model(x(F32 if model is m else BF16))
        reports.append(report)
    difference = reports[0].diff(reports[1])
    assert list(difference) == [
        ("0", "Linear", "float32", "bfloat16"),
        ("2", "Linear", "float32", "bfloat16"),
    ]
    assert str(difference).splitlines()[1].split() == ["0", "Linear", "float32", "bfloat16"]
    with dtypepin.audit(m) as report:
        m[0](x(F32))
    assert ("1", "LayerNorm", "float32", "not called") in reports[0].diff(report)
    assert not reports[0].diff(reports[0])
    assert str(reports[0].diff(reports[0])) == "no module computed in other dtypes"


def test_a_model_of_two_thousand_modules():
    m = nn.Sequential(*(nn.Linear(2, 2) for _ in range(2000))).bfloat16()
    with dtypepin.pin_dtype(m, r"^\d+$"), dtypepin.audit(m) as report, torch.no_grad():
        m(x(BF16, 2))
    assert len(report.pins) == 2000
    assert {pin.verdict for pin in report.pins} == {"honoured"}
    assert len(report.modules) == 2001


def test_what_is_no_module_is_refused():
    with pytest.raises(PinError, match=r"model: got function, expected a torch\.nn\.Module"):
        dtypepin.audit(lambda: None)
