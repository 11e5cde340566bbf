"""Small transformers models with random weights."""

from __future__ import annotations

from functools import partial
from typing import Any

from entry import Entry

#: What most configurations of text models share, whatever they call it.
TINY: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def ids() -> dict[str, Any]:
    import torch

    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 9:] = 0
    return {"input_ids": torch.randint(3, 99, (2, 12)), "attention_mask": mask}


_MODELS: list[tuple[str, str, Any, dict[str, Any]]] = [
    ("encoder", "BertForMaskedLM", ids, TINY),
    ("encoder", "RobertaForMaskedLM", ids, TINY),
    ("decoder", "LlamaForCausalLM", ids, TINY),
    ("decoder", "GPT2LMHeadModel", ids, TINY),
    ("decoder", "Gemma2ForCausalLM", ids, {**TINY, "head_dim": 8}),
    ("MoE", "MixtralForCausalLM", ids, {**TINY, "num_local_experts": 4}),
    ("state-space", "MambaForCausalLM", ids, TINY),
]


def _build(name: str, inputs: Any, config: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    import transformers

    kind = getattr(transformers, name)
    return kind(kind.config_class(**config)), inputs()


TRANSFORMERS = [
    Entry(name, family, partial(_build, name, inputs, config))
    for family, name, inputs, config in _MODELS
]
