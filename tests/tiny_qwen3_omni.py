"""A tiny Qwen3-Omni: thinker with experts, audio and vision towers; with or without a talker."""

from pathlib import Path
from typing import Any

from transformers import (
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeForConditionalGeneration,
    Qwen3OmniMoeProcessor,
    WhisperFeatureExtractor,
)

from tests.tiny import QWEN_SPECIAL, qwen_tokenizer, save_qwen
from tests.tool_template import with_tools

OMNI_SPECIAL = (
    *QWEN_SPECIAL,
    *("<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"),
    *("<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"),
)

_CALL, _UNUSED = "<tool_call>", "<|vision_pad|>"

ROLES = ("system", "user", "assistant")
"""One token each, as in the real tokenizer: the talker looks for them."""

TEMPLATE = """
{%- macro render(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}
{%- for part in content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'audio' -%}<|audio_start|><|audio_pad|><|audio_end|>
{%- elif part.type == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>
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

_DECODER = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 65536,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1_000_000,
        "mrope_section": [12, 10, 10],
        "mrope_interleaved": True,
    },
}


def qwen3_omni(
    folder: Path, *, seed: int, talker: bool = False, calls: bool = False, **overrides: Any
) -> None:
    """Qwen3-Omni; with ``calls``, a template with tools and a token that begins calls;
    ``overrides`` go to the thinker's text config."""
    special = [_CALL if calls and token == _UNUSED else token for token in OMNI_SPECIAL]
    tokenizer = qwen_tokenizer(
        520,
        tuple(special),
        ROLES,
        image_token="<|image_pad|>",
        audio_token="<|audio_pad|>",
        video_token="<|video_pad|>",
        vision_bos_token="<|vision_start|>",
        vision_eos_token="<|vision_end|>",
        audio_bos_token="<|audio_start|>",
        audio_eos_token="<|audio_end|>",
    )
    size = {"shortest_edge": 32 * 32, "longest_edge": 256 * 256}
    processor = Qwen3OmniMoeProcessor(
        image_processor=Qwen2VLImageProcessor(patch_size=16, merge_size=2, size=size),
        video_processor=Qwen2VLVideoProcessor(patch_size=16, merge_size=2, size=size),
        feature_extractor=WhisperFeatureExtractor(feature_size=32, return_attention_mask=True),
        tokenizer=tokenizer,
        chat_template=with_tools(TEMPLATE) if calls else TEMPLATE,
    )
    token_id = tokenizer.convert_tokens_to_ids
    placeholders = {
        "image_token_id": token_id("<|image_pad|>"),
        "video_token_id": token_id("<|video_pad|>"),
        "audio_token_id": token_id("<|audio_pad|>"),
        "vision_start_token_id": token_id("<|vision_start|>"),
        "vision_end_token_id": token_id("<|vision_end|>"),
        "audio_start_token_id": token_id("<|audio_start|>"),
        "audio_end_token_id": token_id("<|audio_end|>"),
        "position_id_per_seconds": 13,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    if calls:
        # With two, the random weights do not come to the end of a call that they must write.
        experts |= {"num_hidden_layers": 3}
    text = _DECODER | experts | {"vocab_size": len(tokenizer), "intermediate_size": 96} | overrides
    audio = {
        "num_mel_bins": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "d_model": 32,
        "output_dim": text["hidden_size"],
        "downsample_hidden_size": 16,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    thinker = {
        "text_config": text,
        "audio_config": audio,
        "vision_config": vision,
        "user_token_id": token_id("user"),
        **placeholders,
    }
    config = Qwen3OmniMoeConfig(
        thinker_config=thinker,
        talker_config=_talker(text["hidden_size"], placeholders) if talker else None,
        code2wav_config=_CODE2WAV if talker else None,
        enable_audio_output=talker,
        im_start_token_id=token_id("<|im_start|>"),
        im_end_token_id=token_id("<|im_end|>"),
        tts_pad_token_id=token_id("<tts_pad>"),
        tts_bos_token_id=token_id("<tts_text_bos>"),
        tts_eos_token_id=token_id("<tts_text_eod>"),
        system_token_id=token_id("system"),
        user_token_id=token_id("user"),
        assistant_token_id=token_id("assistant"),
    )
    model = Qwen3OmniMoeForConditionalGeneration(config).eval()
    save_qwen(model, processor, folder, seed)


# The last 1,024 of the talker's vocabulary are control codes, of which only the end is ever said.
_CODES = 32


def _talker(thinker_hidden_size: int, placeholders: dict[str, int]) -> dict[str, Any]:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    return {
        "text_config": _DECODER
        | experts
        | {
            "num_hidden_layers": 2,
            "vocab_size": _CODES + 1024,
            "intermediate_size": 96,
            "shared_expert_intermediate_size": 48,
        },
        "code_predictor_config": {
            "vocab_size": _CODES,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_code_groups": 4,
        },
        "num_code_groups": 4,
        "thinker_hidden_size": thinker_hidden_size,
        "accept_hidden_layer": 1,
        "codec_eos_token_id": _CODES,
        "codec_nothink_id": _CODES + 1,
        "codec_think_bos_id": _CODES + 2,
        "codec_think_eos_id": _CODES + 3,
        "codec_pad_id": _CODES + 4,
        "codec_bos_id": _CODES + 5,
        "speaker_id": {"ethan": _CODES + 6, "chelsie": _CODES + 7},
        "spatial_merge_size": 2,
        **placeholders,
    }


_CODE2WAV = {
    "codebook_size": _CODES,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_quantizers": 4,
    "upsample_rates": [4, 3],
    "upsampling_ratios": [2, 2],
    "decoder_dim": 32,
}
