"""What is said of each pin."""

import threading

import pytest
import torch
from audited import BF16, F32, OwnAutocast, verdicts, x
from torch import nn

import dtypepin
from dtypepin import PinError


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


def test_pins_that_are_switched_off():
    m = nn.Sequential(nn.Linear(4, 4)).bfloat16()
    with dtypepin.pin_dtype(m, "0") as pins, dtypepin.audit(m) as report, pins.disabled():
        m(x())
    assert verdicts(report) == {"0": ("never ran", "switched off by disabled()")}


def test_no_pin_is_not_honoured():
    m = nn.Sequential(nn.Linear(4, 4))
    with dtypepin.audit(m) as report:
        m(x(F32))
    with pytest.raises(PinError, match="there was no pin to honour"):
        report.assert_honoured()


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


def test_a_pin_that_runs_in_another_thread_only_is_not_called_honoured():
    m = nn.Sequential(OwnAutocast(4, 4))
    with dtypepin.pin_dtype(m, "0"), dtypepin.audit(m) as report:
        thread = threading.Thread(target=m, args=(x(F32),))
        thread.start()
        thread.join()
    other = "only in another thread, which is not recorded"
    assert verdicts(report) == {"0": ("never ran", other)}
