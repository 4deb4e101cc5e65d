"""A tiny Qwen3-VL."""

from pathlib import Path
from typing import Any

from transformers import (
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from tests.tiny import qwen_tokenizer, save_qwen

THINK = ("<think>", "</think>")

QWEN3_VL_TEMPLATE = """
{%- macro render(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}
{%- for part in content -%}
{%- if part.type == 'image' or 'image' in part -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' or 'video' in part -%}<|vision_start|><|video_pad|><|vision_end|>
{%- elif 'text' in part -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + render(message.content) + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
""".strip()


_ANSWER = """
{%- set said = render(message.content) -%}
{%- if message.role == 'assistant' and '</think>' in said -%}
{%- set said = said.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
""".strip()
THINKING_TEMPLATE = (
    QWEN3_VL_TEMPLATE.replace("render(message.content) +", "said +")
    .replace("{%- for message in messages -%}", "{%- for message in messages -%}" + _ANSWER)
    .replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n'")
)
"""Opens the reasoning of an answer, and leaves that of earlier answers out."""


def qwen3_vl_processor(*, thinking: bool) -> Qwen3VLProcessor:
    """Create a processor of Qwen3-VL with a small vocabulary.

    Args:
        thinking: whether answers begin with reasoning.
    """
    tokenizer = qwen_tokenizer(500)
    if thinking:
        tokenizer.add_tokens(list(THINK))
    # At most 64 tokens for an image and as many for a video, so that tests stay quick.
    size = {"shortest_edge": 32 * 32, "longest_edge": 256 * 256}
    video_size = {"shortest_edge": 2 * 32 * 32, "longest_edge": 32 * 64 * 64}
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(patch_size=16, merge_size=2, size=size),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(patch_size=16, merge_size=2, size=video_size),
        chat_template=THINKING_TEMPLATE if thinking else QWEN3_VL_TEMPLATE,
    )


def qwen3_vl(
    folder: Path, *, seed: int, moe: bool = False, thinking: bool = False, **overrides: Any
) -> None:
    """Qwen3-VL: deepstack vision tower, interleaved multimodal RoPE, timestamps in videos.

    ``moe`` gives the decoder experts, ``thinking`` the template and the tokens of a Thinking
    checkpoint; ``overrides`` go to the text config.
    """
    config_class, model_class = Qwen3VLConfig, Qwen3VLForConditionalGeneration
    if moe:
        config_class, model_class = Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
        # Its third layer gets no features of the vision tower's layers.
        overrides = experts | {"num_hidden_layers": 3} | overrides
    processor = qwen3_vl_processor(thinking=thinking)
    tokenizer = processor.tokenizer
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 65536,
        "tie_word_embeddings": False,
    } | overrides
    half = text["head_dim"] // 2
    side = half * 5 // 16  # 24, 20, 20 of 64 in the real models
    text.setdefault(
        "rope_parameters",
        {
            "rope_type": "default",
            "rope_theta": 5_000_000,
            "mrope_section": [half - 2 * side, side, side],
            "mrope_interleaved": True,
        },
    )
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
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
    model = model_class(config).eval()
    save_qwen(model, processor, folder, seed)
