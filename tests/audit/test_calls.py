"""The calls of modules, what goes in and what comes out."""

import pytest
from audited import F16, F32, row, verdicts, x
from torch import nn

import dtypepin


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


def test_time_is_there_on_request_and_marked():
    m = nn.Sequential(nn.Linear(4, 4))
    with dtypepin.audit(m, timing=True) as report:
        m(x(F32))
    assert row(report, "").seconds >= row(report, "0").seconds > 0
    assert report.notes == ["times are disturbed by the measuring; compare them, no more"]
    assert str(report).splitlines()[0].endswith("  ms")


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
