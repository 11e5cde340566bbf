"""A plan on paper and on disk."""

import json
import math

import pytest
from advised import smooth, transformer
from torch import nn

import dtypepin
from dtypepin import PinError
from dtypepin._advice.plan import Plan, PlanRow


def test_a_plan_saved_and_loaded(tmp_path):
    model, x = transformer(), smooth(32, 16)
    plan = dtypepin.suggest(model, x, holdout=x)
    plan.save(tmp_path / "plan.json")
    loaded = dtypepin.load_plan(tmp_path / "plan.json", model)
    assert loaded == plan
    assert loaded.pin_arguments() == plan.pin_arguments()
    other = nn.Linear(16, 16)
    with pytest.raises(PinError, match=r"does not fit Linear: got no module at '.*', expected"):
        dtypepin.load_plan(tmp_path / "plan.json", other)
    model[int(plan.names[0][0])] = nn.Identity()
    with pytest.raises(PinError, match=r"got (Identity|no module) at '.*', expected "):
        dtypepin.load_plan(tmp_path / "plan.json", model)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.pop("rows"),
        lambda data: data.update(dtypepin_plan=99),
        lambda data: data.update(more=1),
        lambda data: data.update(output="drop"),
        lambda data: data.update(target="low"),
        lambda data: data["rows"][0].update(pinned="yes"),
        lambda data: data["rows"][0].pop("name"),
        lambda data: data.update(error_held_out=[1.0]),
        lambda data: data.update(error_held_out=[1.0, "b"]),
        lambda data: data.update(notes=None),
        lambda data: data.update(notes=[1]),
        lambda data: data.update(unit="apples"),
        lambda data: data.update(reached="no"),
        lambda data: data.update(runs=True),
        lambda data: data.update(forward_equivalents="many"),
        lambda data: data.update(target=math.nan),
        lambda data: data["rows"][0].update(remark=None),
        lambda data: data["rows"][0].update(price="1"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(damage, tmp_path):
    path = tmp_path / "plan.json"
    row = PlanRow("a", "Linear", pinned=True, share=1.0, gain=1.0, gain_keep=1.0, price=1.0)
    Plan([row], "restore", "flops", 1.0, 0.5, 0.1, 0.1, None, True, 1, 1.0).save(path)
    assert dtypepin.load_plan(path).names == ["a"]
    data = json.loads(path.read_text())
    damage(data)
    path.write_text(json.dumps(data))
    with pytest.raises(PinError, match=r"plan\.json: got .*, expected a file of Plan\.save"):
        dtypepin.load_plan(path)
    path.write_text("{")
    with pytest.raises(PinError, match=r"expected a file of Plan\.save"):
        dtypepin.load_plan(path)


def test_the_printed_plan(golden):
    rows = [
        PlanRow("a.fc", "Linear", True, 0.5, 0.4, 0.45, 2.5e6),
        PlanRow("a.norm", "LayerNorm", False, 0.0, 0.0, 0.0, 100.0, "useless"),
        *(PlanRow(f"b.{i}", "Linear", False, 0.01, -0.01, 0.01, 1e3) for i in range(11)),
    ]
    plan = Plan(
        rows, "restore", "flops", 6e-3, 3e-3, 2.9e-3, 2.8e-3, (7e-3, 3.1e-3), True, 5, 12.5, ["so"]
    )
    golden("plan.txt", str(plan))
