"""Where the first inf or nan comes from."""

import torch
from audited import BF16, F16, row, verdicts, x
from torch import nn

import dtypepin


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
