"""Small transformers models with random weights."""

from __future__ import annotations

from functools import partial
from typing import Any

from entry import Entry

#: What most configurations of text models share; what one does not know it ignores.
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
#: The same for encoder-decoders that are called after Bart.
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
#: And for those that are called after T5.
T5: dict[str, Any] = {
    "vocab_size": 99,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
#: Vision transformers.
VISION: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
#: Those that work in stages.
STAGES: dict[str, Any] = {
    "image_size": 64,
    "num_channels": 3,
    "embed_dim": 16,
    "depths": [1, 1],
    "num_heads": [2, 4],
    "window_size": 4,
}
#: Encoders of raw audio.
AUDIO: dict[str, Any] = {
    **TINY,
    "conv_dim": (16, 16),
    "conv_kernel": (8, 3),
    "conv_stride": (4, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
}


#: What finds objects in images.
DETR: dict[str, Any] = {
    **SEQ2SEQ,
    "num_queries": 4,
    "hidden_size": 32,
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "backbone_config": {
        "model_type": "resnet",
        "hidden_sizes": [8, 8, 16, 16],
        "depths": [1, 1, 1, 1],
        "embedding_size": 8,
        "out_features": ["stage4"],
    },
}


def ids() -> dict[str, Any]:
    import torch

    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 9:] = 0
    return {"input_ids": torch.randint(3, 99, (2, 12)), "attention_mask": mask}


def both() -> dict[str, Any]:
    import torch

    return {**ids(), "decoder_input_ids": torch.randint(3, 99, (2, 7))}


def image(size: int = 32) -> dict[str, Any]:
    import torch

    return {"pixel_values": torch.randn(2, 3, size, size)}


def video(size: int = 32) -> dict[str, Any]:
    import torch

    return {"pixel_values": torch.randn(2, 4, 3, size, size)}


def sound(length: int = 400) -> dict[str, Any]:
    import torch

    return {"input_values": torch.randn(2, length)}


def spectrogram(bins: int, length: int, key: str = "input_features") -> dict[str, Any]:
    import torch

    return {key: torch.randn(2, bins, length)}


def placed(number: int, token: int) -> dict[str, Any]:
    """A text with as many places for an image as it takes, and the image."""
    import torch

    texts = torch.cat([torch.full((2, number), token), torch.randint(3, 80, (2, 6))], 1)
    return {
        "input_ids": texts,
        "attention_mask": torch.ones_like(texts),
        "token_type_ids": (texts == token).long(),
        **image(),
    }


def series() -> Any:
    import torch

    return torch.randn(2, 24, 3)


def past_and_future() -> dict[str, Any]:
    import torch

    return {
        "past_values": torch.randn(2, 14),
        "past_time_features": torch.randn(2, 14, 2),
        "past_observed_mask": torch.ones(2, 14),
        "future_values": torch.randn(2, 4),
        "future_time_features": torch.randn(2, 4, 2),
    }


def trajectory() -> dict[str, Any]:
    import torch

    return {
        "states": torch.randn(2, 4, 5),
        "actions": torch.randn(2, 4, 3),
        "rewards": torch.randn(2, 4, 1),
        "returns_to_go": torch.randn(2, 4, 1),
        "timesteps": torch.arange(4).repeat(2, 1),
        "attention_mask": torch.ones(2, 4),
    }


_MODELS: list[tuple[str, str, Any, dict[str, Any]]] = [
    *[
        ("encoder", name, ids, {**TINY, **more})
        for name, more in {
            "AlbertForMaskedLM": {"embedding_size": 16},
            "BertForMaskedLM": {},
            "BigBirdForMaskedLM": {"attention_type": "original_full"},
            "CamembertForMaskedLM": {},
            "CanineModel": {},
            "ConvBertForMaskedLM": {"embedding_size": 16},
            "DebertaForMaskedLM": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
            "DebertaV2ForMaskedLM": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
            "DistilBertForMaskedLM": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
            "ElectraForMaskedLM": {"embedding_size": 16},
            "ErnieForMaskedLM": {},
            "EsmForMaskedLM": {"position_embedding_type": "rotary", "mask_token_id": 3},
            "EuroBertForMaskedLM": {},
            "FNetForMaskedLM": {},
            "FlaubertWithLMHeadModel": {"emb_dim": 32, "n_layers": 2, "n_heads": 4},
            "IBertForMaskedLM": {},
            "LayoutLMForMaskedLM": {},
            "LongformerForMaskedLM": {"attention_window": 4},
            "LukeForMaskedLM": {"entity_vocab_size": 10, "entity_emb_size": 16},
            "MPNetForMaskedLM": {},
            "MegatronBertForMaskedLM": {},
            "MobileBertForMaskedLM": {
                "embedding_size": 32,
                "intra_bottleneck_size": 16,
                "true_hidden_size": 16,
            },
            "ModernBertForMaskedLM": {},
            "MraForMaskedLM": {},
            "NomicBertForMaskedLM": {},
            "NystromformerForMaskedLM": {"num_landmarks": 12, "segment_means_seq_len": 12},
            "RemBertForMaskedLM": {"input_embedding_size": 16, "output_embedding_size": 16},
            "RoCBertForMaskedLM": {"pronunciation_vocab_size": 99, "shape_vocab_size": 99},
            "RoFormerForMaskedLM": {"embedding_size": 16},
            "RobertaForMaskedLM": {},
            "RobertaPreLayerNormForMaskedLM": {},
            "SplinterModel": {},
            "SqueezeBertForMaskedLM": {"embedding_size": 32},
            "TapasModel": {},
            "XLMRobertaXLForMaskedLM": {},
            "XLMWithLMHeadModel": {"emb_dim": 32, "n_layers": 2, "n_heads": 4},
            "XmodForMaskedLM": {"languages": ["en_XX"], "default_language": "en_XX"},
            "YosoForMaskedLM": {},
        }.items()
    ],
    *[
        ("decoder", name, ids, {**TINY, **more})
        for name, more in {
            "ApertusForCausalLM": {},
            "ArceeForCausalLM": {},
            "BioGptForCausalLM": {},
            "BitNetForCausalLM": {},
            "BloomForCausalLM": {"n_layer": 2, "n_head": 4},
            "CTRLLMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 48},
            "CodeGenForCausalLM": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
            "CohereForCausalLM": {},
            "Cohere2ForCausalLM": {},
            "DiffLlamaForCausalLM": {},
            "Exaone4ForCausalLM": {},
            "FalconForCausalLM": {},
            "Gemma2ForCausalLM": {"head_dim": 8},
            "Gemma3ForCausalLM": {"head_dim": 8},
            "Gemma3nForCausalLM": {
                "head_dim": 8,
                "num_kv_shared_layers": 0,
                "vocab_size_per_layer_input": 99,
                "hidden_size_per_layer_input": 8,
                "laurel_rank": 4,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "GemmaForCausalLM": {"head_dim": 8},
            "Glm4ForCausalLM": {"head_dim": 8},
            "GlmForCausalLM": {"head_dim": 8},
            "GPT2LMHeadModel": {},
            "GPTBigCodeForCausalLM": {},
            "GPTJForCausalLM": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
            "GPTNeoForCausalLM": {
                "num_layers": 2,
                "num_heads": 4,
                "attention_types": [[["global", "local"], 1]],
            },
            "GPTNeoXForCausalLM": {},
            "GraniteForCausalLM": {},
            "HeliumForCausalLM": {"head_dim": 8},
            "LlamaForCausalLM": {},
            "MinistralForCausalLM": {"head_dim": 8},
            "MistralForCausalLM": {},
            "ModernBertDecoderForCausalLM": {},
            "MptForCausalLM": {"d_model": 32, "n_layers": 2, "n_heads": 4},
            "NanoChatForCausalLM": {},
            "NemotronForCausalLM": {},
            "OPTForCausalLM": {"ffn_dim": 48, "word_embed_proj_dim": 32},
            "Olmo2ForCausalLM": {},
            "Olmo3ForCausalLM": {},
            "OlmoForCausalLM": {},
            "OpenAIGPTLMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 4},
            "PersimmonForCausalLM": {},
            "Phi3ForCausalLM": {},
            "PhiForCausalLM": {},
            "Qwen2ForCausalLM": {},
            "Qwen3ForCausalLM": {"head_dim": 8},
            "SeedOssForCausalLM": {"head_dim": 8},
            "SmolLM3ForCausalLM": {},
            "StableLmForCausalLM": {},
            "Starcoder2ForCausalLM": {},
            "VaultGemmaForCausalLM": {"head_dim": 8},
            "XGLMForCausalLM": {
                "d_model": 32,
                "num_layers": 2,
                "attention_heads": 4,
                "ffn_dim": 48,
            },
        }.items()
    ],
    *[
        ("MoE", name, ids, {**TINY, **more})
        for name, more in {
            "AfmoeForCausalLM": {
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "num_dense_layers": 1,
                "head_dim": 8,
            },
            "DbrxForCausalLM": {
                "d_model": 32,
                "n_heads": 4,
                "n_layers": 2,
                "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
                "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
            },
            "DeepseekV2ForCausalLM": {
                "num_key_value_heads": 4,
                "n_routed_experts": 4,
                "n_group": 1,
                "topk_group": 1,
                "kv_lora_rank": 8,
                "q_lora_rank": 8,
                "qk_nope_head_dim": 8,
                "qk_rope_head_dim": 8,
                "v_head_dim": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 16,
            },
            "DeepseekV3ForCausalLM": {
                "num_key_value_heads": 4,
                "n_routed_experts": 4,
                "n_group": 2,
                "topk_group": 1,
                "kv_lora_rank": 8,
                "q_lora_rank": 8,
                "qk_nope_head_dim": 8,
                "qk_rope_head_dim": 8,
                "v_head_dim": 8,
                "num_experts_per_tok": 2,
                "first_k_dense_replace": 1,
                "moe_intermediate_size": 16,
            },
            "Ernie4_5_MoeForCausalLM": {"moe_num_experts": 4, "moe_k": 2},
            "FlexOlmoForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2},
            "Glm4MoeForCausalLM": {
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 16,
                "head_dim": 8,
            },
            "GptOssForCausalLM": {
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "head_dim": 8,
            },
            "GraniteMoeForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
            "HunYuanMoEV1ForCausalLM": {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
            "JetMoeForCausalLM": {"num_local_experts": 4, "kv_channels": 8},
            "Llama4ForCausalLM": {
                "num_local_experts": 4,
                "head_dim": 8,
                "intermediate_size_mlp": 48,
                "moe_layers": [1],
            },
            "MiniMaxForCausalLM": {"num_local_experts": 4, "head_dim": 8, "block_size": 4},
            "MixtralForCausalLM": {"num_local_experts": 4},
            "OlmoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2},
            "PhimoeForCausalLM": {"num_local_experts": 4, "head_dim": 8},
            "Qwen2MoeForCausalLM": {
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 16,
                "shared_expert_intermediate_size": 16,
            },
            "Qwen3MoeForCausalLM": {
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 16,
                "head_dim": 8,
            },
        }.items()
    ],
    ("MoE", "SwitchTransformersForConditionalGeneration", both, {**T5, "num_experts": 4}),
    ("MoE", "NllbMoeForConditionalGeneration", both, {**SEQ2SEQ, "num_experts": 4}),
    *[
        ("state-space", name, ids, {**TINY, **more})
        for name, more in {
            "BambaForCausalLM": {
                "attn_layer_indices": [1],
                "mamba_n_heads": 8,
                "mamba_d_head": 8,
                "mamba_d_state": 8,
                "mamba_n_groups": 1,
            },
            "FalconH1ForCausalLM": {
                "mamba_d_ssm": 64,
                "mamba_n_heads": 8,
                "mamba_d_head": 8,
                "mamba_d_state": 8,
                "head_dim": 8,
            },
            "FalconMambaForCausalLM": {"state_size": 8},
            "GraniteMoeHybridForCausalLM": {
                "layer_types": ["mamba", "attention"],
                "mamba_n_heads": 8,
                "mamba_d_head": 8,
                "mamba_d_state": 8,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "shared_intermediate_size": 16,
            },
            "JambaForCausalLM": {
                "attn_layer_period": 2,
                "attn_layer_offset": 1,
                "num_experts": 4,
                "mamba_d_state": 8,
            },
            "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"]},
            "Mamba2ForCausalLM": {
                "num_heads": 8,
                "head_dim": 8,
                "state_size": 8,
                "n_groups": 1,
                "chunk_size": 4,
            },
            "MambaForCausalLM": {"state_size": 8},
            "NemotronHForCausalLM": {
                "layers_block_type": ["mamba", "attention"],
                "mamba_num_heads": 8,
                "mamba_head_dim": 8,
                "ssm_state_size": 8,
                "n_groups": 1,
                "head_dim": 8,
            },
            "Qwen3NextForCausalLM": {
                "layer_types": ["linear_attention", "full_attention"],
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 16,
                "shared_expert_intermediate_size": 16,
                "head_dim": 8,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
            },
            "RecurrentGemmaForCausalLM": {
                "lru_width": 32,
                "head_dim": 8,
                "attention_window_size": 8,
                "block_types": ["recurrent", "attention"],
            },
            "RwkvForCausalLM": {"attention_hidden_size": 32},
            "Zamba2ForCausalLM": {
                "layers_block_type": ["mamba", "hybrid"],
                "mamba_d_state": 8,
                "n_mamba_heads": 8,
                "mamba_ngroups": 1,
            },
            "ZambaForCausalLM": {
                "num_hidden_layers": 4,
                "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
                "mamba_d_state": 8,
                "n_mamba_heads": 2,
            },
        }.items()
    ],
    *[
        ("encoder-decoder", name, both, {**SEQ2SEQ, **more})
        for name, more in {
            "BartForConditionalGeneration": {},
            "BigBirdPegasusForConditionalGeneration": {"attention_type": "original_full"},
            "BlenderbotForConditionalGeneration": {},
            "FSMTForConditionalGeneration": {
                "langs": ["en", "de"],
                "src_vocab_size": 99,
                "tgt_vocab_size": 99,
            },
            "LEDForConditionalGeneration": {
                "attention_window": 4,
                "max_encoder_position_embeddings": 64,
                "max_decoder_position_embeddings": 64,
            },
            "M2M100ForConditionalGeneration": {},
            "MBartForConditionalGeneration": {},
            "MarianMTModel": {},
            "MvpForConditionalGeneration": {},
            "PLBartForConditionalGeneration": {},
            "PegasusForConditionalGeneration": {},
            "PegasusXForConditionalGeneration": {"block_size": 4, "num_global_tokens": 2},
        }.items()
    ],
    *[
        ("encoder-decoder", name, both, T5)
        for name in (
            "LongT5ForConditionalGeneration",
            "MT5ForConditionalGeneration",
            "T5ForConditionalGeneration",
            "UMT5ForConditionalGeneration",
        )
    ],
    *[
        ("vision", name, image, {**VISION, **more})
        for name, more in {
            "BeitForImageClassification": {},
            "ConvNextForImageClassification": {"hidden_sizes": [16, 32], "depths": [1, 1]},
            "ConvNextV2ForImageClassification": {"hidden_sizes": [16, 32], "depths": [1, 1]},
            "Data2VecVisionForImageClassification": {},
            "DeiTForImageClassification": {},
            "Dinov2ForImageClassification": {},
            "Dinov2WithRegistersForImageClassification": {},
            "DINOv3ViTModel": {},
            "IJepaForImageClassification": {},
            "MobileNetV1ForImageClassification": {},
            "MobileNetV2ForImageClassification": {},
            "PvtForImageClassification": {
                "hidden_sizes": [16, 16, 32, 32],
                "depths": [1, 1, 1, 1],
                "num_attention_heads": [1, 1, 2, 2],
            },
            "ResNetForImageClassification": {
                "hidden_sizes": [16, 32],
                "depths": [1, 1],
                "embedding_size": 16,
            },
            "ViTForImageClassification": {},
            "ViTMSNForImageClassification": {},
            "VitDetModel": {"pretrain_image_size": 32, "dropout_prob": 0.0},
            "YolosForObjectDetection": {"image_size": [32, 32], "num_detection_tokens": 4},
        }.items()
    ],
    *[
        ("vision", name, partial(image, 64), {**STAGES, **more})
        for name, more in {
            "DonutSwinModel": {},
            "EfficientNetForImageClassification": {"width_coefficient": 0.25, "hidden_dim": 320},
            "FocalNetForImageClassification": {"hidden_sizes": [16, 32]},
            "GLPNForDepthEstimation": {
                "hidden_sizes": [16, 16, 32, 32],
                "depths": [1, 1, 1, 1],
                "num_attention_heads": [1, 1, 2, 2],
                "decoder_hidden_size": 16,
            },
            "HieraForImageClassification": {
                "image_size": [64, 64],
                "num_heads": [1, 2],
                "query_stride": [2, 2],
                "num_query_pool": 1,
                "masked_unit_size": [8, 8],
            },
            "LevitForImageClassification": {
                "image_size": 64,
                "hidden_sizes": [32, 32, 32],
                "num_attention_heads": [2, 2, 2],
                "depths": [1, 1, 1],
                "key_dim": [8, 8, 8],
            },
            "MobileViTForImageClassification": {
                "hidden_sizes": [16, 16, 32],
                "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32],
                "num_attention_heads": 4,
            },
            "MobileViTV2ForImageClassification": {"width_multiplier": 0.25},
            "PoolFormerForImageClassification": {
                "hidden_sizes": [8, 8, 16, 16],
                "depths": [1, 1, 1, 1],
            },
            "PvtV2ForImageClassification": {
                "hidden_sizes": [8, 8, 16, 16],
                "depths": [1, 1, 1, 1],
                "num_attention_heads": [1, 1, 2, 2],
            },
            "SegformerForSemanticSegmentation": {
                "hidden_sizes": [8, 8, 16, 16],
                "depths": [1, 1, 1, 1],
                "num_attention_heads": [1, 1, 2, 2],
                "decoder_hidden_size": 16,
            },
            "Swin2SRForImageSuperResolution": {"depths": [1, 1]},
            "SwinForImageClassification": {},
            "SwiftFormerForImageClassification": {
                "embed_dims": [8, 8, 16, 16],
                "depths": [1, 1, 1, 1],
            },
            "Swinv2ForImageClassification": {},
            "TextNetForImageClassification": {},
        }.items()
    ],
    (
        "encoder",
        "FunnelForMaskedLM",
        ids,
        {
            "vocab_size": 99,
            "block_sizes": [1, 1],
            "d_model": 32,
            "n_head": 4,
            "d_head": 8,
            "d_inner": 48,
        },
    ),
    (
        "encoder",
        "XLNetLMHeadModel",
        ids,
        {"vocab_size": 99, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
    ),
    (
        "encoder-decoder",
        "ProphetNetForConditionalGeneration",
        both,
        {
            "vocab_size": 99,
            "hidden_size": 32,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 64,
        },
    ),
    (
        "vision",
        "BitForImageClassification",
        image,
        {"depths": [1, 1], "hidden_sizes": [16, 32], "embedding_size": 16, "num_groups": 4},
    ),
    (
        "vision",
        "CvtForImageClassification",
        image,
        {
            "embed_dim": [16, 32, 32],
            "num_heads": [1, 2, 4],
            "depth": [1, 2, 3],
        },
    ),
    (
        "vision",
        "RegNetForImageClassification",
        image,
        {"hidden_sizes": [16, 32], "depths": [1, 1], "embedding_size": 16, "groups_width": 16},
    ),
    ("vision", "TimesformerForVideoClassification", video, {**VISION, "num_frames": 4}),
    (
        "vision",
        "VivitForVideoClassification",
        video,
        {**VISION, "num_frames": 4, "tubelet_size": [2, 8, 8]},
    ),
    (
        "vision",
        "VideoMAEForVideoClassification",
        video,
        {**VISION, "num_frames": 4, "tubelet_size": 2},
    ),
    *[
        ("audio", name, sound, {**AUDIO, **more})
        for name, more in {
            "Data2VecAudioForCTC": {"num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 3},
            "HubertForCTC": {},
            "SEWDForCTC": {"squeeze_factor": 1},
            "SEWForCTC": {"squeeze_factor": 1},
            "UniSpeechForCTC": {},
            "UniSpeechSatForCTC": {},
            "Wav2Vec2ConformerForCTC": {},
            "Wav2Vec2ForCTC": {},
            "WavLMForCTC": {},
        }.items()
    ],
    (
        "audio",
        "ASTForAudioClassification",
        partial(spectrogram, 24, 16, "input_values"),
        {**VISION, "num_mel_bins": 16, "max_length": 24, "frequency_stride": 8, "time_stride": 8},
    ),
    (
        "audio",
        "WhisperForConditionalGeneration",
        lambda: {**spectrogram(8, 40), "decoder_input_ids": both()["decoder_input_ids"]},
        {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 20},
    ),
    (
        "audio",
        "Speech2TextForConditionalGeneration",
        lambda: {**spectrogram(40, 8), "decoder_input_ids": both()["decoder_input_ids"]},
        {
            **SEQ2SEQ,
            "input_feat_per_channel": 8,
            "conv_channels": 16,
            "max_source_positions": 64,
            "max_target_positions": 64,
        },
    ),
    (
        "audio",
        "MoonshineForConditionalGeneration",
        lambda: {**sound(2000), "decoder_input_ids": both()["decoder_input_ids"]},
        {
            **TINY,
            "encoder_num_hidden_layers": 2,
            "decoder_num_hidden_layers": 2,
            "encoder_num_attention_heads": 4,
            "decoder_num_attention_heads": 4,
            "encoder_num_key_value_heads": 4,
            "decoder_num_key_value_heads": 4,
        },
    ),
    (
        "audio",
        "Wav2Vec2BertForCTC",
        partial(spectrogram, 12, 16),
        {**TINY, "feature_projection_input_dim": 16, "layerdrop": 0.0, "mask_time_prob": 0.0},
    ),
    (
        "audio",
        "EncodecModel",
        lambda: {"input_values": sound(640)["input_values"][:, None]},
        {
            "num_filters": 4,
            "hidden_size": 16,
            "codebook_size": 16,
            "upsampling_ratios": [4, 2],
            "num_lstm_layers": 1,
        },
    ),
    (
        "audio",
        "DacModel",
        lambda: {"input_values": sound(640)["input_values"][:, None]},
        {
            "encoder_hidden_size": 8,
            "decoder_hidden_size": 16,
            "downsampling_ratios": [4, 2],
            "upsampling_ratios": [2, 4],
            "n_codebooks": 2,
            "codebook_size": 16,
            "codebook_dim": 4,
        },
    ),
    (
        "audio",
        "MimiModel",
        lambda: {"input_values": sound(640)["input_values"][:, None]},
        {
            **TINY,
            "num_filters": 4,
            "upsampling_ratios": [4, 2],
            "codebook_size": 16,
            "head_dim": 8,
            "codebook_dim": 16,
            "vector_quantization_hidden_dimension": 16,
            "num_quantizers": 2,
            "num_semantic_quantizers": 1,
            "upsample_groups": 32,
        },
    ),
    (
        "audio",
        "ClapAudioModel",
        lambda: {"input_features": image(64)["pixel_values"][:, :1]},
        {
            "spec_size": 64,
            "patch_size": 4,
            "patch_stride": [4, 4],
            "num_mel_bins": 64,
            "window_size": 4,
            "depths": [1, 1],
            "num_attention_heads": [2, 2],
            "hidden_size": 32,
            "patch_embeds_hidden_size": 16,
            "projection_dim": 16,
        },
    ),
    (
        "audio",
        "MusicgenForCausalLM",
        lambda: {"input_ids": ids()["input_ids"].repeat(2, 1)},
        {
            **TINY,
            "num_codebooks": 2,
            "ffn_dim": 48,
        },
    ),
    (
        "audio",
        "UnivNetModel",
        lambda: {"input_features": spectrogram(10, 8)["input_features"]},
        {
            "model_in_channels": 8,
            "model_hidden_channels": 8,
            "num_mel_bins": 8,
            "resblock_kernel_sizes": [3],
            "resblock_stride_sizes": [4],
            "resblock_dilation_sizes": [[1, 3]],
            "kernel_predictor_num_blocks": 1,
            "kernel_predictor_hidden_channels": 8,
            "kernel_predictor_conv_size": 3,
        },
    ),
    (
        "audio",
        "VitsModel",
        ids,
        {
            **TINY,
            "ffn_dim": 48,
            "flow_size": 32,
            "spectrogram_bins": 9,
            "window_size": 4,
            "duration_predictor_filter_channels": 16,
            "depth_separable_num_layers": 1,
            "prior_encoder_num_flows": 1,
            "prior_encoder_num_wavenet_layers": 1,
            "posterior_encoder_num_wavenet_layers": 1,
            "upsample_initial_channel": 32,
            "upsample_rates": [4, 4],
            "upsample_kernel_sizes": [8, 8],
            "duration_predictor_num_flows": 1,
        },
    ),
    *[
        (
            "multimodal",
            name,
            lambda: {**ids(), **image()},
            {"text_config": TINY, "vision_config": VISION, "projection_dim": 16, **more},
        )
        for name, more in {
            "AltCLIPModel": {},
            "BlipModel": {},
            "CLIPModel": {},
            "CLIPSegModel": {},
            "ChineseCLIPModel": {},
            "GroupViTModel": {
                "vision_config": {
                    **VISION,
                    "depths": [1, 1],
                    "num_group_tokens": [4, 0],
                    "num_output_groups": [4, 2],
                }
            },
            "MetaClip2Model": {},
            "OwlViTModel": {},
            "SiglipModel": {},
        }.items()
    ],
    (
        "multimodal",
        "AlignModel",
        lambda: {**ids(), **image(64)},
        {
            "text_config": TINY,
            "projection_dim": 80,
            "vision_config": {
                "image_size": 64,
                "width_coefficient": 0.25,
                "hidden_dim": 32,
                "depth_divisor": 8,
            },
        },
    ),
    (
        "multimodal",
        "FlavaModel",
        lambda: {**ids(), **image(), "skip_multimodal_encoder": False},
        {
            "text_config": TINY,
            "image_config": VISION,
            "multimodal_config": TINY,
            "hidden_size": 32,
            "projection_dim": 16,
        },
    ),
    ("multimodal", "ViltModel", lambda: {**ids(), **image()}, {**VISION, **TINY}),
    (
        "multimodal",
        "VisualBertModel",
        lambda: {**ids(), "visual_embeds": video()["pixel_values"][:, :, 0, 0, :16]},
        {
            **TINY,
            "visual_embedding_dim": 16,
        },
    ),
    (
        "multimodal",
        "LxmertModel",
        lambda: {
            **ids(),
            "visual_feats": video()["pixel_values"][:, :, 0, 0, :16],
            "visual_pos": video()["pixel_values"][:, :, 0, 0, :4],
        },
        {**TINY, "visual_feat_dim": 16, "l_layers": 1, "r_layers": 1, "x_layers": 1},
    ),
    (
        "multimodal",
        "GitForCausalLM",
        lambda: {**ids(), **image()},
        {**TINY, "vision_config": VISION},
    ),
    (
        "multimodal",
        "BridgeTowerModel",
        lambda: {**ids(), **image(), "pixel_mask": None},
        {
            **TINY,
            "hidden_size": 64,
            "text_config": {**TINY, "hidden_size": 64},
            "vision_config": {**VISION, "hidden_size": 64},
        },
    ),
    (
        "multimodal",
        "LayoutLMv3Model",
        lambda: {**ids(), **image()},
        {
            **TINY,
            "input_size": 32,
            "patch_size": 8,
            "coordinate_size": 5,
            "shape_size": 6,
            "max_2d_position_embeddings": 1024,
        },
    ),
    (
        "multimodal",
        "TrOCRForCausalLM",
        ids,
        {
            **SEQ2SEQ,
            "cross_attention_hidden_size": 32,
            "is_decoder": True,
        },
    ),
    (
        "multimodal",
        "Blip2ForConditionalGeneration",
        partial(placed, 4, 90),
        {
            "vision_config": VISION,
            "qformer_config": {**TINY, "encoder_hidden_size": 32},
            "text_config": {**TINY, "model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32},
            "num_query_tokens": 4,
            "image_token_index": 90,
        },
    ),
    *[
        (
            "multimodal",
            name,
            partial(placed, 16, 90),
            {
                "text_config": {**TINY, "model_type": "llama"},
                "image_token_index": 90,
                "image_token_id": 90,
                "vision_config": {**VISION, "model_type": "clip_vision_model"},
                "image_seq_length": 16,
                **more,
            },
        )
        for name, more in {
            "LlavaForConditionalGeneration": {},
            "VipLlavaForConditionalGeneration": {"vision_feature_layers": [-1, -2]},
            "PaliGemmaForConditionalGeneration": {
                "text_config": {**TINY, "model_type": "gemma", "head_dim": 8},
                "vision_config": {**VISION, "model_type": "siglip_vision_model"},
                "projection_dim": 32,
            },
            "Gemma3ForConditionalGeneration": {
                "text_config": {**TINY, "head_dim": 8},
                "vision_config": {**VISION, "model_type": "siglip_vision_model"},
                "mm_tokens_per_image": 16,
            },
            "AyaVisionForConditionalGeneration": {
                "text_config": {**TINY, "model_type": "cohere2"},
                "vision_config": {**VISION, "model_type": "siglip_vision_model"},
                "downsample_factor": 1,
            },
        }.items()
    ],
    (
        "time series",
        "PatchTSTForPrediction",
        lambda: {"past_values": series()},
        {
            "num_input_channels": 3,
            "context_length": 24,
            "prediction_length": 4,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": 32,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "ffn_dim": 48,
        },
    ),
    (
        "time series",
        "PatchTSMixerForPrediction",
        lambda: {"past_values": series()},
        {
            "num_input_channels": 3,
            "context_length": 24,
            "prediction_length": 4,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": 32,
            "num_layers": 2,
            "self_attn": True,
            "self_attn_heads": 4,
        },
    ),
    *[
        (
            "time series",
            name,
            past_and_future,
            {
                **SEQ2SEQ,
                "prediction_length": 4,
                "context_length": 12,
                "lags_sequence": [1, 2],
                "num_time_features": 2,
                "moving_average": 3,
                "label_length": 4,
            },
        )
        for name in (
            "AutoformerForPrediction",
            "InformerForPrediction",
            "TimeSeriesTransformerForPrediction",
        )
    ],
    (
        "time series",
        "DecisionTransformerModel",
        trajectory,
        {
            "state_dim": 5,
            "act_dim": 3,
            "hidden_size": 32,
            "n_layer": 2,
            "n_head": 4,
            "max_ep_len": 20,
        },
    ),
    ("detection", "DetrForObjectDetection", partial(image, 64), {**DETR}),
    ("detection", "ConditionalDetrForObjectDetection", partial(image, 64), {**DETR}),
    ("detection", "DabDetrForObjectDetection", partial(image, 64), {**DETR}),
    (
        "detection",
        "DeformableDetrForObjectDetection",
        partial(image, 64),
        {**DETR, "num_feature_levels": 1},
    ),
    ("detection", "TableTransformerForObjectDetection", partial(image, 64), {**DETR}),
    (
        "segmentation",
        "SamModel",
        lambda: image(32),
        {
            "vision_config": {
                **VISION,
                "output_channels": 16,
                "window_size": 2,
                "global_attn_indexes": [1],
                "mlp_dim": 48,
                "num_pos_feats": 8,
            },
            "prompt_encoder_config": {
                "hidden_size": 16,
                "image_size": 32,
                "patch_size": 8,
                "mask_input_channels": 4,
            },
            "mask_decoder_config": {
                "hidden_size": 16,
                "mlp_dim": 32,
                "num_attention_heads": 2,
                "iou_head_hidden_dim": 16,
            },
        },
    ),
    (
        "segmentation",
        "MaskFormerModel",
        partial(image, 64),
        {
            "backbone_config": {
                "model_type": "swin",
                "image_size": 64,
                "embed_dim": 8,
                "depths": [1, 1, 1, 1],
                "num_heads": [1, 1, 2, 2],
                "window_size": 4,
                "out_features": ["stage1", "stage2", "stage3", "stage4"],
            },
            "decoder_config": {"model_type": "detr", **DETR},
            "fpn_feature_size": 32,
            "mask_feature_size": 32,
        },
    ),
    (
        "segmentation",
        "Mask2FormerModel",
        partial(image, 64),
        {
            "backbone_config": {
                "model_type": "swin",
                "image_size": 64,
                "embed_dim": 8,
                "depths": [1, 1, 1, 1],
                "num_heads": [1, 1, 2, 2],
                "window_size": 4,
                "out_features": ["stage1", "stage2", "stage3", "stage4"],
            },
            "feature_size": 32,
            "mask_feature_size": 32,
            "hidden_dim": 32,
            "encoder_feedforward_dim": 48,
            "encoder_layers": 1,
            "decoder_layers": 2,
            "num_attention_heads": 4,
            "dim_feedforward": 48,
            "num_queries": 4,
        },
    ),
    (
        "segmentation",
        "UperNetForSemanticSegmentation",
        partial(image, 64),
        {
            "backbone_config": {
                "model_type": "convnext",
                "hidden_sizes": [8, 8, 16, 16],
                "depths": [1, 1, 1, 1],
                "out_features": ["stage1", "stage2", "stage3", "stage4"],
            },
            "hidden_size": 16,
            "auxiliary_in_channels": 16,
            "auxiliary_channels": 8,
            "pool_scales": [1, 2],
        },
    ),
    (
        "segmentation",
        "DPTForDepthEstimation",
        partial(image, 32),
        {
            **VISION,
            "num_hidden_layers": 4,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [8, 8, 16, 16],
            "fusion_hidden_size": 16,
            "reassemble_factors": [4, 2, 1, 0.5],
        },
    ),
]


def _build(name: str, inputs: Any, config: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    import transformers

    kind = getattr(transformers, name)
    return kind(kind.config_class(**config)), inputs()


TRANSFORMERS = [
    Entry(name, family, partial(_build, name, inputs, config))
    for family, name, inputs, config in _MODELS
]
