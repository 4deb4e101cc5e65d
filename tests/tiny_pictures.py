"""Tiny models of ``pipelines/families/pictures.py``, with the processors of the released models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.tiny import qwen_tokenizer, save_qwen

_TEMPLATE = """
{%- for message in messages -%}
{{ '<|im_start|>' ~ message.role ~ '\\n' }}
{%- for part in message.content -%}
{{ {'image': 'IMAGE', 'video': 'VIDEO'}.get(part.type, part.text) }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
""".strip()
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 14,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_BOUNDS: Any = {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}


def _tokenizer(template: str, *special: str, video: str = "", **named: str) -> Any:
    """A tokenizer with a chat template; ``named`` tokens are attributes of it."""
    tokens = (*_SPECIAL, *special, *named.values())
    return qwen_tokenizer(
        500,
        tokens,
        chat_template=_TEMPLATE.replace("IMAGE", template).replace("VIDEO", video),
        model_specific_special_tokens=named,
    )


def _token_ids(tokenizer: Any, **tokens: str) -> dict[str, Any]:
    """Ids of tokens under their names in a configuration."""
    token_id = tokenizer.convert_tokens_to_ids
    return {f"{name}_token_id": token_id(token) for name, token in tokens.items()}


def _internvl() -> tuple[Any, str, dict[str, Any], dict[str, Any]]:
    tokenizer = _tokenizer(
        "<IMG_CONTEXT>\\n",
        video="<video>\\n",
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>",
        video_token="<video>",
    )
    size: Any = {"height": 56, "width": 56}
    processor = transformers.InternVLProcessor(
        transformers.GotOcr2ImageProcessor(size=size, max_patches=4),
        tokenizer,
        transformers.InternVLVideoProcessor(size=size),
        image_seq_length=4,
        chat_template=tokenizer.chat_template,
    )
    vision = _TOWER | {"image_size": [56, 56], "patch_size": [14, 14]}
    return processor, "<IMG_CONTEXT>", vision, {"image_seq_length": 4}


def _gemma3() -> tuple[Any, str, dict[str, Any], dict[str, Any]]:
    tokenizer = _tokenizer(
        "<start_of_image>",
        boi_token="<start_of_image>",
        eoi_token="<end_of_image>",
        image_token="<image_soft_token>",
    )
    size: Any = {"height": 56, "width": 56}
    processor = transformers.Gemma3Processor(
        transformers.Gemma3ImageProcessor(size=size),
        tokenizer,
        image_seq_length=16,
        chat_template=tokenizer.chat_template,
    )
    vision = _TOWER | {"model_type": "siglip_vision_model", "image_size": 56}
    return processor, "<image_soft_token>", vision, {"mm_tokens_per_image": 16}


def _gemma4() -> tuple[Any, str, dict[str, Any], dict[str, Any]]:
    tokenizer = _tokenizer(
        "<|image|>",
        image_token="<|image|>",
        boi_token="<|image>",
        eoi_token="<image|>",
        audio_token="<|audio|>",
        boa_token="<|audio>",
        eoa_token="<audio|>",
    )
    processor = transformers.Gemma4Processor(
        transformers.Gemma4AudioFeatureExtractor(),
        transformers.Gemma4ImageProcessor(patch_size=8, max_soft_tokens=70),
        tokenizer,
        transformers.Gemma4VideoProcessor(patch_size=8),
        chat_template=tokenizer.chat_template,
    )
    ids = _token_ids(
        tokenizer,
        boi="<|image>",
        eoi="<image|>",
        audio="<|audio|>",
        boa="<|audio>",
        video="<|video|>",
    )
    ids["eoa_token_index"] = tokenizer.convert_tokens_to_ids("<audio|>")
    vision = _TOWER | {"patch_size": 8, "num_key_value_heads": 2, "head_dim": 16}
    return processor, "<|image|>", vision, ids | {"audio_config": None}


def _mistral3() -> tuple[Any, str, dict[str, Any], dict[str, Any]]:
    tokenizer = _tokenizer("[IMG]", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
    processor = transformers.PixtralProcessor(
        transformers.PixtralImageProcessor(patch_size=14, size={"longest_edge": 112}),
        tokenizer,
        patch_size=14,
        spatial_merge_size=2,
        chat_template=tokenizer.chat_template,
    )
    vision = _TOWER | {"model_type": "pixtral", "image_size": 112, "head_dim": 16}
    return processor, "[IMG]", vision, {"spatial_merge_size": 2}


def _llava_onevision() -> tuple[Any, str, dict[str, Any], dict[str, Any]]:
    tokenizer = _tokenizer("<image>\\n", "<image>", "<video>", video="<video>\\n")
    size: Any = {"height": 56, "width": 56}
    grids: Any = [[56 * down, 56 * across] for down in (1, 2, 3) for across in (1, 2, 3)]
    processor = transformers.LlavaOnevisionProcessor(
        transformers.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=grids),
        tokenizer,
        transformers.LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_4",
        chat_template=tokenizer.chat_template,
    )
    vision = _TOWER | {"model_type": "siglip_vision_model", "image_size": 56}
    fields = {
        "image_grid_pinpoints": grids,
        "vision_aspect_ratio": "anyres_max_4",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "video_token_id": tokenizer.convert_tokens_to_ids("<video>"),
    }
    return processor, "<image>", vision, fields


def _tiles(kind: str) -> tuple[Any, str, dict[str, Any], dict[str, Any]]:
    places = [f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)]
    tokenizer = _tokenizer(
        "<image>",
        *places,
        "<fake_token_around_image>",
        "<global-img>",
        "<end_of_utterance>",
        "<image>",
    )
    sizes: Any = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
    parts = [getattr(transformers, f"{kind}ImageProcessor")(**sizes), tokenizer]
    if kind == "SmolVLM":
        parts.append(transformers.SmolVLMVideoProcessor(**sizes))
    processor = getattr(transformers, f"{kind}Processor")(
        *parts, image_seq_len=4, chat_template=tokenizer.chat_template
    )
    return processor, "<image>", _TOWER | {"image_size": 56}, {"scale_factor": 2}


def _glm4v() -> tuple[Any, str, dict[str, Any], dict[str, Any]]:
    tokenizer = _tokenizer(
        "<|begin_of_image|><|image|><|end_of_image|>",
        "<|begin_of_image|>",
        "<|end_of_image|>",
        "<|begin_of_video|>",
        "<|end_of_video|>",
        "<|image|>",
        "<|video|>",
        video="<|begin_of_video|><|video|><|end_of_video|>",
    )
    processor = transformers.Glm4vProcessor(
        transformers.Glm4vImageProcessor(size=_BOUNDS),
        tokenizer,
        transformers.Glm4vVideoProcessor(size=_BOUNDS),
        chat_template=tokenizer.chat_template,
    )
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 64,
        "out_hidden_size": 128,
        "image_size": 112,
    }
    names = ("image", "video"), ("start", "end")
    ids = {
        f"{kind}_{place}_token_id": tokenizer.convert_tokens_to_ids(
            f"<|{'begin' if place == 'start' else place}_of_{kind}|>"
        )
        for kind in names[0]
        for place in names[1]
    }
    ids["video_token_id"] = tokenizer.convert_tokens_to_ids("<|video|>")
    return processor, "<|image|>", vision, ids


def _paddleocr_vl() -> tuple[Any, str, dict[str, Any], dict[str, Any]]:
    tokenizer = _tokenizer(
        "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        "<|IMAGE_START|>",
        "<|IMAGE_END|>",
        image_token="<|IMAGE_PLACEHOLDER|>",
    )
    processor = transformers.PaddleOCRVLProcessor(
        transformers.PaddleOCRVLImageProcessor(size=_BOUNDS),
        tokenizer,
        chat_template=tokenizer.chat_template,
    )
    ids = {
        f"vision_{place}_token_id": tokenizer.convert_tokens_to_ids(f"<|IMAGE_{place.upper()}|>")
        for place in ("start", "end")
    }
    vision = _TOWER | {"image_size": 112}
    return processor, "<|IMAGE_PLACEHOLDER|>", vision, ids


# As in released checkpoints, media come first, and the next turn writes the end of an answer.
_MEDIA_FIRST = """
{%- set shown = namespace(images=0, videos=0) -%}
{%- for message in messages if message.content is not string -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{%- set shown.images = shown.images + 1 -%}
{%- elif part.type == 'video' -%}{%- set shown.videos = shown.videos + 1 -%}
{%- endif -%}
{%- endfor -%}
{%- endfor -%}
{%- for number in range(shown.images) -%}
{{ ('Image ' ~ (number + 1) if shown.images > 1 else '') ~ '<|image|>' }}
{%- endfor -%}
{{ '<|video|>' * shown.videos }}
{%- for message in messages -%}
{%- if message.role != ('user' if loop.index0 is even else 'assistant') -%}
{{ raise_exception('user and assistant must alternate') }}
{%- endif -%}
{{ '<|im_end|>\n' if message.role == 'user' and not loop.first else '' }}
{{- '<|im_start|>' ~ message.role ~ '\n' }}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{{ message.content | map(attribute='text', default='') | select | join(' ') }}
{%- endif -%}
{{ '<|im_end|>\n' if message.role == 'user' else '' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
""".strip()
_MOLMO2_TOKENS = (
    "<im_start>",
    "<im_end>",
    "<im_patch>",
    "<im_col>",
    "<low_res_im_start>",
    "<|image|>",
    "<im_low>",
    "<frame_start>",
    "<frame_end>",
    "<|video|>",
)


def _molmo2() -> tuple[Any, str, dict[str, Any], dict[str, Any]]:
    tokenizer = qwen_tokenizer(
        500,
        (*_SPECIAL, *_MOLMO2_TOKENS),
        chat_template=_MEDIA_FIRST,
        bos_token="<|im_end|>",
        model_specific_special_tokens={"image_token": "<|image|>", "video_token": "<|video|>"},
    )
    size: Any = {"height": 84, "width": 84}
    processor = transformers.Molmo2Processor(
        transformers.Molmo2ImageProcessor(size=size, max_crops=4, overlap_margins=[1, 1]),
        transformers.Molmo2VideoProcessor(size=size),
        tokenizer,
        chat_template=tokenizer.chat_template,
        use_frame_special_tokens=False,
    )
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    vision = _TOWER | heads | {"image_size": [84, 84]}
    adapter = heads | {
        "hidden_size": 32,
        "intermediate_size": 64,
        "text_hidden_size": 128,
        "vision_feature_layer": [-1, -2],
    }
    ids = _token_ids(
        tokenizer,
        image_start="<im_start>",
        low_res_image_start="<low_res_im_start>",
        image_end="<im_end>",
        frame_start="<frame_start>",
        frame_end="<frame_end>",
    )
    return processor, "<im_patch>", vision, ids | {"adapter_config": adapter}


_MROPE = {"rope_parameters": _ROPE | {"mrope_section": [8, 12, 12]}}
_HALF = {"rope_parameters": _ROPE | {"mrope_section": [4, 6, 6], "partial_rotary_factor": 0.5}}
PICTURES: dict[str, tuple[Callable[[], tuple[Any, str, dict[str, Any], dict[str, Any]]], dict]] = {
    "internvl": (_internvl, {"model_type": "qwen3"}),
    "llava_onevision": (_llava_onevision, {"model_type": "qwen2"}),
    "gemma3": (
        _gemma3,
        {
            "model_type": "gemma3_text",
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 24,
        },
    ),
    "gemma4": (
        _gemma4,
        {
            "model_type": "gemma4_text",
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 24,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_global_key_value_heads": 1,
            "head_dim": 32,
            "global_head_dim": 64,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "use_bidirectional_attention": "vision",
            "final_logit_softcapping": 2.0,
        },
    ),
    "mistral3": (_mistral3, {"model_type": "mistral", "sliding_window": None}),
    "idefics3": (lambda: _tiles("Idefics3"), {"model_type": "llama"}),
    "smolvlm": (lambda: _tiles("SmolVLM"), {"model_type": "llama"}),
    "glm4v": (_glm4v, _HALF),
    "glm4v_moe": (
        _glm4v,
        _HALF
        | {
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "paddleocr_vl": (_paddleocr_vl, _MROPE),
}
"""Model type -> processor, placeholder, vision and other fields; fields of the text model."""
if "molmo2" in transformers.CONFIG_MAPPING:  # Since transformers 5.20.
    # The head has no tokens that stand for media.
    _vocabulary = {"vocab_size": 500 - len(_MOLMO2_TOKENS), "additional_vocab_size": 10}
    PICTURES["molmo2"] = (_molmo2, _vocabulary | {"rope_parameters": _ROPE})


def build_pictures(model_type: str, folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a tiny checkpoint of a model type in ``PICTURES`` with its processor; ``overrides`` are
    fields of the text model."""
    parts, text = PICTURES[model_type]
    processor, placeholder, vision, fields = parts()
    tokenizer = processor.tokenizer
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    old = model_type in ("mistral3", "gemma3")
    name = "image_token_index" if old else "image_token_id"
    config = AutoConfig.for_model(
        model_type,
        text_config=sizes | text | overrides,
        vision_config=vision,
        tie_word_embeddings=False,
        **{name: tokenizer.convert_tokens_to_ids(placeholder)},
        **fields,
    )
    model = AutoModelForImageTextToText.from_config(config).float().eval()
    save_qwen(model, processor, folder, seed)
    return folder
