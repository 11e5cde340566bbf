"""Why a pin has not run."""

import pytest
import torch
from audited import CallsForward, verdicts, x
from torch import nn

import dtypepin
from dtypepin import PinError


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
