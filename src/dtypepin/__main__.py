"""``python -m dtypepin``: the main job on a small transformer."""

from __future__ import annotations

import argparse
import copy

import torch
from torch import Tensor, nn

import dtypepin
from dtypepin._base.dtypes import short


class Block(nn.Module):
    """One transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then transform."""
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Transformer(nn.Module):
    """Token ids in, logits out."""

    def __init__(self, vocabulary: int = 256, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits for each position."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def run(model: nn.Module, ids: Tensor) -> Tensor:
    """A forward under bf16 autocast."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out: Tensor = model(ids)
    return out


def audited(model: nn.Module, ids: Tensor) -> tuple[dtypepin.AuditReport, dict[str, str]]:
    """What really ran: the report, and the dtypes that each module computed in."""
    with dtypepin.audit(model) as report:
        run(model, ids)
    return report, {row.name: ", ".join(row.compute) for row in report.modules}


def main() -> int:
    """Run the demonstration.

    Returns:
        The exit code: 0, or 1 if the undo was not exact.
    """
    argparse.ArgumentParser(
        prog="python -m dtypepin",
        description="Pin parts of a small transformer to float32 under bf16 autocast, show what "
        "that changes, and take the pins off again. Takes no arguments.",
    ).parse_args()
    torch.manual_seed(0)
    model = Transformer().eval()
    ids = torch.randint(0, 256, (4, 32))
    with torch.no_grad():
        reference = model(ids)
    untouched = copy.deepcopy(model)
    watched = ["blocks.0.norm1", "blocks.0.mlp.0", "blocks.1.mlp.2", "head"]

    def error(out: Tensor) -> str:
        return f"{((out.float() - reference).norm() / reference.norm()).item():.2e}"

    plain = run(model, ids)
    _, plain_dtypes = audited(model, ids)

    print(
        "A transformer of 2 blocks under bf16 autocast, its MLPs, its head and one norm pinned to"
    )
    print("float32. What really ran, as dtypepin.audit saw it:\n")
    pins = dtypepin.apply(model, patterns=[r"\bmlp$", r"^head$", r"0\.norm1$"], output="keep")
    pinned = run(model, ids)
    report, pinned_dtypes = audited(model, ids)
    print(report)
    report.assert_honoured()
    print("\nThe pin on the norm changes nothing: CPU autocast runs norms in float32 anyway.")

    rows = [("computes in", "unpinned", "pinned")]
    rows += [(name, plain_dtypes[name], pinned_dtypes[name]) for name in watched]
    rows += [("logits", short(plain.dtype), short(pinned.dtype))]
    rows += [("error against fp32", error(plain), error(pinned))]
    print()
    for row in rows:
        print(f"{row[0]:<20}{row[1]:<12}{row[2]}")

    pins.remove()
    after, before = model.state_dict(), untouched.state_dict()
    exact = torch.equal(run(model, ids), plain) and list(after) == list(before)
    exact = exact and all(
        torch.equal(after[key], before[key]) and after[key].dtype == before[key].dtype
        for key in before
    )
    exact = exact and all(
        one.__dict__.keys() == two.__dict__.keys()
        and not one._forward_hooks
        and not one._forward_pre_hooks
        and type(one._parameters) is type(two._parameters)
        for one, two in zip(model.modules(), untouched.modules(), strict=True)
    )
    print(
        "\nPins removed. "
        + (
            "The undo was exact: same hooks, same attributes, same bits in every weight and output."
            if exact
            else "The undo was NOT exact; please report this."
        )
    )
    return 0 if exact else 1


if __name__ == "__main__":
    raise SystemExit(main())
