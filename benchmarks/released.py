"""Released models: the sizes of their config.json, and the same in small."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Released:
    """A model as it was released.

    Attributes:
        source: hub id of the checkpoint whose config.json and preprocessor_config.json say this.
        family: ``config.model_type``; ``benchmarks.random_model`` builds it.
        text: of its text_config, as far as shapes and RoPE go.
        vision: of its vision_config; audio: of its audio_config.
        pixels: least and most pixels of an image.
    """

    source: str
    family: str
    text: dict[str, Any]
    vision: dict[str, Any]
    audio: dict[str, Any] = field(default_factory=dict)
    pixels: tuple[int, int] = (65536, 16777216)

    def with_positions(self, least: int) -> Released:
        """The same with room for at least so many tokens, for which RoPE needs no weights."""
        known = self.text["max_position_embeddings"]
        return replace(self, text=self.text | {"max_position_embeddings": max(known, least)})

    def tiny(self) -> Released:
        """The same in small, for a CPU: each layer of its kind is there, and so is its ratio of
        query heads to KV heads."""
        queries = min(self.text["num_attention_heads"] // self.text["num_key_value_heads"], 4)
        text = {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": max(queries, 2),
            "num_key_value_heads": max(queries, 2) // queries,
            "vocab_size": 800,
        }
        if "num_experts" in self.text:
            text |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        vision = {"hidden_size": 32, "intermediate_size": 64}
        if self.family == "llava_next":
            heads = {"num_hidden_layers": 3, "num_attention_heads": 2}
            vision |= heads | {"image_size": 56, "projection_dim": 32}
        else:
            indexes = {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
            vision |= {"depth": 3, "num_heads": 2, "out_hidden_size": 64} | indexes
        audio = {
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "d_model": 32,
            "output_dim": 64,
            "downsample_hidden_size": 16,
        }
        return replace(
            self,
            text=self.text | text,
            vision=self.vision | vision,
            audio=self.audio and self.audio | audio,
            pixels=(1024, 65536),
        )


def _rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


_MROPE = {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
_LLAMA = {
    "vocab_size": 32064,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
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
_MOE = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
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

RELEASED = {
    "llava-1.6-vicuna-7b": Released(
        source="llava-hf/llava-v1.6-vicuna-7b-hf",
        family="llava_next",
        text=_LLAMA
        | {"model_type": "llama", "intermediate_size": 11008, "num_key_value_heads": 32}
        | {"max_position_embeddings": 4096}
        | _rope(10000.0),
        vision=_CLIP,
    ),
    "llava-1.6-mistral-7b": Released(
        source="llava-hf/llava-v1.6-mistral-7b-hf",
        family="llava_next",
        text=_LLAMA
        | {"model_type": "mistral", "intermediate_size": 14336, "num_key_value_heads": 8}
        | {"max_position_embeddings": 32768, "sliding_window": None}
        | _rope(1e6),
        vision=_CLIP,
    ),
    "qwen3-vl-8b": Released(
        source="Qwen/Qwen3-VL-8B-Instruct",
        family="qwen3_vl",
        text={
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
        }
        | _rope(5e6, **_MROPE),
        vision=_QWEN_VISION | {"out_hidden_size": 4096},
    ),
    "qwen3-vl-30b-a3b": Released(
        source="Qwen/Qwen3-VL-30B-A3B-Instruct",
        family="qwen3_vl_moe",
        text=_MOE
        | {"vocab_size": 151936, "intermediate_size": 6144, "max_position_embeddings": 262144}
        | _rope(5e6, **_MROPE),
        vision=_QWEN_VISION | {"out_hidden_size": 2048},
    ),
    "qwen3-omni-30b-a3b": Released(
        source="Qwen/Qwen3-Omni-30B-A3B-Instruct, the thinker",
        family="qwen3_omni_moe",
        text=_MOE
        | {"vocab_size": 152064, "intermediate_size": 768, "max_position_embeddings": 65536}
        | _rope(1e6, **_MROPE),
        vision=_QWEN_VISION | {"out_hidden_size": 2048},
        audio={
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
        },
        pixels=(3136, 12845056),
    ),
}
