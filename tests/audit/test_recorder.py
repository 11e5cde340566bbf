"""What an audit sees of modules and their ops, in every surrounding."""

import threading
import warnings

import pytest
import torch
from audited import BF16, F32, row, verdicts, x
from torch import nn
from torch.utils.checkpoint import checkpoint

import dtypepin
from dtypepin import PinError
from dtypepin._pin import hooks


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
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                with dtypepin.audit(audited) as report:
                    compiled(x())
            assert not [w for w in warned if "global hooks" in str(w.message)]
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


def test_the_fast_path_of_an_encoder_layer_stays_in_use():
    m = nn.TransformerEncoderLayer(4, 2, batch_first=True).eval()
    value = torch.randn(1, 3, 4)
    with dtypepin.audit(m) as report, torch.no_grad():
        m(value)
    assert [r.name for r in report.modules] == [""]  # it calls no child there


def test_a_model_of_two_thousand_modules():
    m = nn.Sequential(*(nn.Linear(2, 2) for _ in range(2000))).bfloat16()
    with dtypepin.pin_dtype(m, r"^\d+$"), dtypepin.audit(m) as report, torch.no_grad():
        m(x(BF16, 2))
    assert len(report.pins) == 2000
    assert {pin.verdict for pin in report.pins} == {"honoured"}
    assert len(report.modules) == 2001


def test_a_call_of_a_pinned_method_is_counted_once_whatever_it_calls():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def encode(self, x):
            return self.inner(x + 1) * 2

    m = Tokens().bfloat16()
    with (
        dtypepin.pin_dtype(m, "^$", methods_to_override=["encode"]),
        dtypepin.audit(m) as report,
    ):
        m.encode(x())
        m.encode(x())
    (row,) = report.pins
    assert (row.method, row.calls) == ("encode", 2)
