"""What may be pinned."""

import torch
from advised import smooth, transformer
from torch import nn

import dtypepin


def test_a_container_with_matmuls_of_its_own_is_a_candidate_and_holds_no_other_pin():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            return self.out((q @ k.transpose(-1, -2) * 4).softmax(-1) @ v)

    torch.manual_seed(0)
    model = nn.Sequential(Attention(), Attention())
    # By FLOPs, "1.out" is bought first and "1" takes its place; by number, "1" comes first.
    for price, tolerance, names in (
        ("flops", 0.9, {"1.out"}),
        ("flops", 0.5, {"1"}),
        ("fewest", 0.02, {"0", "1"}),
    ):
        plan = dtypepin.suggest(model, smooth(16, 8, 16), tolerance=tolerance, price=price)
        assert {row.name for row in plan.rows} >= {"0", "0.qkv", "0.out", "1"}
        assert set(plan.names) == names
        assert plan.reached


def test_candidates_by_pattern_class_and_predicate():
    model, x = transformer(), smooth(32, 16)
    names = [f"{i}.up" for i in range(4)]
    by_pattern = dtypepin.suggest(model, x, candidates=r"\.up$", tolerance=0.9)
    by_predicate = dtypepin.suggest(model, x, candidates=lambda n, _: n[2:] == "up", tolerance=0.9)
    by_class = dtypepin.suggest(model, x, class_candidates="Linear", tolerance=0.9)
    assert sorted(row.name for row in by_pattern.rows) == names
    assert sorted(row.name for row in by_predicate.rows) == names
    assert {row.class_name for row in by_class.rows} == {"Linear"}


def test_what_cannot_be_pinned_is_left_out():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[1] = torch.jit.script(model[1])
    plan = dtypepin.suggest(model, smooth(32, 16), candidates="[01]", tolerance=0.9)
    assert [row.name for row in plan.rows] == ["0"]
    assert "cannot be pinned: 1" in plan.notes[0]
