"""A tiny Qwen3.5."""

from pathlib import Path
from typing import Any

from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from tests.tiny import save_qwen
from tests.tiny_qwen3_vl import qwen3_vl_processor


def qwen3_5(
    folder: Path, *, seed: int, moe: bool = False, thinking: bool = False, **overrides: Any
) -> None:
    """Qwen3.5: two layers of Gated DeltaNet and one of attention, with 256 channels and a gate.

    ``moe`` gives the decoder experts, ``thinking`` the template and the tokens of a checkpoint that
    reasons; ``overrides`` go to the text config.
    """
    config_class, model_class = Qwen3_5Config, Qwen3_5ForConditionalGeneration
    if moe:
        config_class, model_class = Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
        overrides = experts | {"shared_expert_intermediate_size": 64} | overrides
    processor = qwen3_vl_processor(thinking=thinking)
    tokenizer = processor.tokenizer
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "max_position_embeddings": 65536,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    } | overrides
    if not moe:
        text.setdefault("intermediate_size", 128)
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 64,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    token_id = tokenizer.convert_tokens_to_ids
    config = config_class(
        text_config=text,
        vision_config=vision,
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
        tie_word_embeddings=False,
    )
    save_qwen(model_class(config).eval(), processor, folder, seed)
