"""Small diffusers models with random weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from entry import Entry


def randn(*size: int) -> Any:
    import torch

    return torch.randn(size)


def unet(channels: int, size: int, **more: Any) -> dict[str, Any]:
    import torch

    return {"sample": randn(2, channels, size, size), "timestep": torch.tensor([3, 5]), **more}


def tokens(**more: Any) -> dict[str, Any]:
    import torch

    return {"timestep": torch.tensor([3.0, 5.0]), **more}


#: Class: its configuration and its inputs.
_MODELS: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "UNet2DModel": (
        {
            "sample_size": 8,
            "block_out_channels": (16, 32),
            "norm_num_groups": 8,
            "attention_head_dim": 8,
            "layers_per_block": 1,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        partial(unet, 3, 8),
    ),
    "UNet2DConditionModel": (
        {
            "sample_size": 8,
            "block_out_channels": (16, 32),
            "norm_num_groups": 8,
            "attention_head_dim": 8,
            "layers_per_block": 1,
            "cross_attention_dim": 16,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        },
        lambda: unet(4, 8, encoder_hidden_states=randn(2, 5, 16)),
    ),
    "ControlNetModel": (
        {
            "block_out_channels": (16, 32),
            "norm_num_groups": 8,
            "attention_head_dim": 8,
            "layers_per_block": 1,
            "cross_attention_dim": 16,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "conditioning_embedding_out_channels": (8, 16),
        },
        lambda: unet(
            4, 8, encoder_hidden_states=randn(2, 5, 16), controlnet_cond=randn(2, 3, 16, 16)
        ),
    ),
    "AutoencoderKL": (
        {
            "block_out_channels": (16, 32),
            "norm_num_groups": 8,
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
        },
        lambda: {"sample": randn(2, 3, 16, 16)},
    ),
    "AutoencoderTiny": (
        {
            "encoder_block_out_channels": (16, 16),
            "decoder_block_out_channels": (16, 16),
            "num_encoder_blocks": (1, 1),
            "num_decoder_blocks": (1, 1),
        },
        lambda: {"sample": randn(2, 3, 16, 16)},
    ),
    "AutoencoderDC": (
        {
            "latent_channels": 4,
            "attention_head_dim": 8,
            "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "encoder_block_out_channels": (16, 16),
            "decoder_block_out_channels": (16, 16),
            "encoder_layers_per_block": (1, 1),
            "decoder_layers_per_block": (1, 1),
            "encoder_qkv_multiscales": ((), (5,)),
            "decoder_qkv_multiscales": ((), (5,)),
            "upsample_block_type": "interpolate",
        },
        lambda: {"sample": randn(2, 3, 16, 16)},
    ),
    "VQModel": (
        {
            "block_out_channels": (16, 32),
            "norm_num_groups": 8,
            "num_vq_embeddings": 16,
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
        },
        lambda: {"sample": randn(2, 3, 16, 16)},
    ),
    "DiTTransformer2DModel": (
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 2,
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "num_embeds_ada_norm": 10,
            "norm_num_groups": 4,
        },
        lambda: {
            "hidden_states": randn(2, 4, 8, 8),
            "timestep": _integers(3, 5),
            "class_labels": _integers(1, 2),
        },
    ),
    "PixArtTransformer2DModel": (
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 2,
            "sample_size": 8,
            "caption_channels": 16,
            "cross_attention_dim": 16,
            "norm_num_groups": 4,
            "use_additional_conditions": False,
        },
        lambda: {
            "hidden_states": randn(2, 4, 8, 8),
            "encoder_hidden_states": randn(2, 5, 16),
            "timestep": _integers(3, 5),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
    ),
    "SD3Transformer2DModel": (
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 16,
            "pos_embed_max_size": 8,
            "qk_norm": "rms_norm",
        },
        lambda: tokens(
            hidden_states=randn(2, 4, 8, 8),
            encoder_hidden_states=randn(2, 5, 16),
            pooled_projections=randn(2, 16),
        ),
    ),
    "FluxTransformer2DModel": (
        {
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "pooled_projection_dim": 16,
            "axes_dims_rope": [4, 4, 8],
        },
        lambda: tokens(
            hidden_states=randn(2, 16, 4),
            encoder_hidden_states=randn(2, 5, 16),
            pooled_projections=randn(2, 16),
            img_ids=randn(16, 3),
            txt_ids=randn(5, 3),
        ),
    ),
    "CogVideoXTransformer3DModel": (
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 8,
            "text_embed_dim": 16,
            "num_layers": 2,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 5,
            "max_text_seq_length": 5,
        },
        lambda: {
            "hidden_states": randn(2, 2, 4, 8, 8),
            "encoder_hidden_states": randn(2, 5, 16),
            "timestep": _integers(3, 5),
        },
    ),
    "SanaTransformer2DModel": (
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 8,
            "cross_attention_dim": 16,
            "caption_channels": 16,
            "sample_size": 8,
        },
        lambda: {
            "hidden_states": randn(2, 4, 8, 8),
            "encoder_hidden_states": randn(2, 5, 16),
            "timestep": _integers(3, 5),
        },
    ),
    "WanTransformer3DModel": (
        {
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 16,
            "freq_dim": 16,
            "ffn_dim": 32,
            "num_layers": 2,
            "rope_max_seq_len": 32,
        },
        lambda: {
            "hidden_states": randn(2, 4, 2, 8, 8),
            "encoder_hidden_states": randn(2, 5, 16),
            "timestep": _integers(3, 5),
        },
    ),
    "PriorTransformer": (
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 2,
            "embedding_dim": 16,
            "num_embeddings": 5,
            "additional_embeddings": 4,
        },
        lambda: {
            "hidden_states": randn(2, 16),
            "timestep": _integers(3, 5),
            "proj_embedding": randn(2, 16),
            "encoder_hidden_states": randn(2, 5, 16),
        },
    ),
}


def _integers(*values: int) -> Any:
    import torch

    return torch.tensor(values)


def _build(name: str) -> tuple[Any, dict[str, Any]]:
    import diffusers

    config, inputs = _MODELS[name]
    return getattr(diffusers, name)(**config), inputs()


DIFFUSERS = [Entry(f"diffusers/{name}", "diffusers", partial(_build, name)) for name in _MODELS]
