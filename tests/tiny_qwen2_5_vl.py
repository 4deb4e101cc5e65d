"""A tiny Qwen2.5-VL."""

from pathlib import Path
from typing import Any

from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from tests.tiny import qwen_tokenizer, save_qwen
from tests.tiny_qwen3_vl import QWEN3_VL_TEMPLATE


def qwen2_5_vl(folder: Path, *, seed: int, **overrides: Any) -> None:
    """Qwen2.5-VL: windows of 2 x 2 tokens in the tower, biases, times in the positions of videos.

    ``overrides`` go to the text config.
    """
    tokenizer = qwen_tokenizer(500)
    size = {"shortest_edge": 28 * 28, "longest_edge": 224 * 224}
    video_size = {"shortest_edge": 28 * 28, "longest_edge": 84 * 84}
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(patch_size=14, merge_size=2, size=size),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(patch_size=14, merge_size=2, size=video_size),
        chat_template=QWEN3_VL_TEMPLATE,
    )
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 256,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 65536,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1_000_000,
            "mrope_section": [8, 12, 12],
        },
    } | overrides
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 56,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    }
    token_id = tokenizer.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
        tie_word_embeddings=False,
    )
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    save_qwen(model, processor, folder, seed)
