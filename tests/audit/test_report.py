"""The report: tables, plain data, and two of them compared."""

import copy
import json
import pickle

import torch
from audited import BF16, F32, CallsForward, OwnAutocast, x
from torch import nn

import dtypepin


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
