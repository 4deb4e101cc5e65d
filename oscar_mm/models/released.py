"""Released models: the shapes in their config.json and the limits of their processors.

With these, memory can be planned without access to the hub. Each family lists its own models. This
module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ReleasedModel:
    """Shapes of a released model.

    Attributes:
        source: hub id of the checkpoint that the config.json and preprocessor_config.json are from.
        family: ``config.model_type``.
        text: fields of text_config that define shapes and RoPE.
        vision, audio: fields of vision_config and audio_config.
        pixels: minimum and maximum number of pixels per image.
        part: part of the checkpoint that the shapes describe; "" for the full checkpoint.
    """

    source: str
    family: str
    text: dict[str, Any]
    vision: dict[str, Any]
    audio: dict[str, Any] = field(default_factory=dict)
    pixels: tuple[int, int] = (65536, 16777216)
    part: str = ""


def _rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


_MROPE = {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
_LLAMA = {
    "model_type": "llama",
    "vocab_size": 32064,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "projection_dim": 768,
}
_QWEN = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
} | _rope(5e6, **_MROPE)
_MOE = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
} | _rope(5e6, **_MROPE)
_QWEN_VISION = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
_SMALL_QWEN_VISION = _QWEN_VISION | {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "deepstack_visual_indexes": [5, 11, 17],
}
_QWEN2_5 = {
    "vocab_size": 152064,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128000,
    "tie_word_embeddings": False,
} | _rope(1e6, mrope_section=[16, 24, 24])
_QWEN2_5_VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "tokens_per_second": 2,
}
_QWEN_AUDIO = {
    "num_mel_bins": 128,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "d_model": 1280,
    "output_dim": 2048,
    "downsample_hidden_size": 480,
    "max_source_positions": 1500,
    "n_window": 50,
    "n_window_infer": 800,
    "conv_chunksize": 500,
}


def _llava(name: str, **text: Any) -> ReleasedModel:
    return ReleasedModel(f"llava-hf/{name}-hf", "llava_next", _LLAMA | text, _CLIP)


def _qwen(size: str, vision: dict[str, Any], **text: Any) -> ReleasedModel:
    merged = _QWEN | text
    vision = vision | {"out_hidden_size": merged["hidden_size"]}
    return ReleasedModel(f"Qwen/Qwen3-VL-{size}-Instruct", "qwen3_vl", merged, vision)


def _qwen2_5(size: str, vision: int, **text: Any) -> ReleasedModel:
    """Return a Qwen2.5-VL model; ``vision`` is the width of the MLPs in its vision tower."""
    tower = _QWEN2_5_VISION | {"intermediate_size": vision, "out_hidden_size": text["hidden_size"]}
    name, merged = f"Qwen/Qwen2.5-VL-{size}-Instruct", _QWEN2_5 | text
    return ReleasedModel(name, "qwen2_5_vl", merged, tower, pixels=(3136, 12845056))


QWEN2_5_VL = (
    _qwen2_5(
        "3B",
        3420,
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    _qwen2_5(
        "7B",
        3420,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
    ),
    _qwen2_5(
        "32B",
        3456,
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=40,
    ),
    _qwen2_5(
        "72B",
        3456,
        hidden_size=8192,
        intermediate_size=29568,
        num_hidden_layers=80,
        num_attention_heads=64,
    ),
)
QWEN3_VL = (
    _qwen(
        "2B",
        _SMALL_QWEN_VISION,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        tie_word_embeddings=True,
    ),
    _qwen(
        "4B",
        _SMALL_QWEN_VISION,
        hidden_size=2560,
        intermediate_size=9728,
        tie_word_embeddings=True,
    ),
    _qwen("8B", _QWEN_VISION),
    _qwen(
        "32B",
        _QWEN_VISION,
        hidden_size=5120,
        intermediate_size=25600,
        num_hidden_layers=64,
        num_attention_heads=64,
    ),
    ReleasedModel(
        "Qwen/Qwen3-VL-30B-A3B-Instruct",
        "qwen3_vl_moe",
        _MOE,
        _QWEN_VISION | {"out_hidden_size": 2048},
    ),
)
QWEN3_OMNI = (
    ReleasedModel(
        "Qwen/Qwen3-Omni-30B-A3B-Instruct",
        "qwen3_omni_moe",
        _MOE
        | {"vocab_size": 152064, "intermediate_size": 768, "max_position_embeddings": 65536}
        | _rope(1e6, **_MROPE),
        _QWEN_VISION | {"out_hidden_size": 2048},
        audio=_QWEN_AUDIO,
        pixels=(3136, 12845056),
        part="the thinker",
    ),
)
LLAVA_NEXT = (
    _llava("llava-v1.6-vicuna-7b", **_rope(10000.0)),
    _llava(
        "llava-v1.6-mistral-7b",
        model_type="mistral",
        intermediate_size=14336,
        num_key_value_heads=8,
        max_position_embeddings=32768,
        sliding_window=None,
        **_rope(1e6),
    ),
    _llava(
        "llava-v1.6-vicuna-13b",
        hidden_size=5120,
        intermediate_size=13824,
        num_hidden_layers=40,
        num_attention_heads=40,
        num_key_value_heads=40,
        **_rope(10000.0),
    ),
    _llava(
        "llava-v1.6-34b",
        vocab_size=64064,
        hidden_size=7168,
        intermediate_size=20480,
        num_hidden_layers=60,
        num_attention_heads=56,
        num_key_value_heads=8,
        **_rope(5e6),
    ),
)


def _short(source: str) -> str:
    """Return a hub id in lower case, without its owner and without suffixes such as "-instruct".

    Checkpoints of the same shape differ only in these suffixes.
    """
    name = source.rpartition("/")[2].lower()
    for end in ("-hf", "-instruct", "-thinking"):
        name = name.removesuffix(end)
    return name


_ALL = (*LLAVA_NEXT, *QWEN2_5_VL, *QWEN3_VL, *QWEN3_OMNI)
RELEASED = {_short(model.source): model for model in _ALL}
"""Released models by short name: "qwen3-vl-8b", "llava-v1.6-vicuna-7b", ..."""


def add_released(models: Iterable[ReleasedModel]) -> None:
    """Register the released models of a family under their short names."""
    RELEASED.update({_short(model.source): model for model in models})


def released_model(name: str | Path) -> ReleasedModel | None:
    """Return the released model with this name; None if the name is unknown or is a folder.

    Args:
        name: hub id, with or without its owner: "Qwen/Qwen3-VL-8B-Instruct", "qwen3-vl-8b".
    """
    if isinstance(name, Path) or Path(name).is_dir():
        return None
    return RELEASED.get(_short(name))
