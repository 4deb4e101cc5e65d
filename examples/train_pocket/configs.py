"""Configs and processors of the three pocket models."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    CLIPVisionConfig,
    GenerationConfig,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeForConditionalGeneration,
    Qwen3OmniMoeProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
    WhisperFeatureExtractor,
)

from examples.train_pocket.language import build_tokenizer, chat_template

NAMES = ("pocket-vl", "pocket-llava", "pocket-omni")
HIDDEN = 256
TILE = 96
PINPOINTS = [[96, 192], [192, 96], [192, 192]]
PIXELS = {"mean": [0.5] * 3, "std": [0.5] * 3}


@dataclass
class Pocket:
    """A model with random weights and its processor."""

    name: str
    model: PreTrainedModel
    processor: Any

    @property
    def generator(self) -> PreTrainedModel:
        """The model that generates text: for Qwen3-Omni its thinker."""
        return getattr(self.model, "thinker", self.model)

    def save(self, folder: Path) -> None:
        """Write weights in the model's dtype, configs and processor, for from_pretrained."""
        self.model.save_pretrained(folder)
        self.processor.save_pretrained(folder)
        _name_as_released(folder / "model.safetensors")


def _name_as_released(path: Path) -> None:
    """Give the weights of a CLIP tower the names of released checkpoints.

    transformers reads these names and its own; vLLM knows the released ones alone.
    """
    tower = "vision_tower."
    weights = {
        name.replace(tower, f"{tower}vision_model.", 1) if name.startswith(tower) else name: weight
        for name, weight in load_file(path).items()
    }
    save_file(weights, path, metadata={"format": "pt"})


def _text(tokenizer: PreTrainedTokenizerFast, intermediate: int) -> dict[str, Any]:
    return {
        "vocab_size": math.ceil(len(tokenizer) / 64) * 64,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "hidden_size": HIDDEN,
        "intermediate_size": intermediate,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 65536,
        "tie_word_embeddings": False,
    }


def _mrope() -> dict[str, Any]:
    sections = {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0, **sections}}


def _vision(depth: int, hidden: int, deepstack: list[int]) -> dict[str, Any]:
    return {
        "depth": depth,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_heads": 4,
        "out_hidden_size": HIDDEN,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": deepstack,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


def _qwen_media() -> dict[str, Any]:
    """18 to 36 tokens (96 x 192 to 192 x 192 pixels) for an image, as in training."""
    pixels = {"image_mean": PIXELS["mean"], "image_std": PIXELS["std"]}
    patches = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
    size = {"shortest_edge": 96 * 192, "longest_edge": 192 * 192}
    video_size = {"shortest_edge": 2 * 96 * 192, "longest_edge": 32 * 96 * 192}
    return {
        "image_processor": Qwen2VLImageProcessor(**patches, **pixels, size=size),
        "video_processor": Qwen3VLVideoProcessor(**patches, **pixels, size=video_size),
    }


def _pocket_vl(dtype: torch.dtype) -> Pocket:
    tokenizer = build_tokenizer(llava=False)
    token = tokenizer.convert_tokens_to_ids
    config = Qwen3VLConfig(
        text_config=_text(tokenizer, 384) | _mrope(),
        vision_config=_vision(5, 128, [1, 3]),
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=False,
        dtype=dtype,
    )
    processor = Qwen3VLProcessor(
        tokenizer=tokenizer, chat_template=chat_template(llava=False), **_qwen_media()
    )
    return Pocket("pocket-vl", Qwen3VLForConditionalGeneration(config), processor)


def _pocket_llava(dtype: torch.dtype) -> Pocket:
    tokenizer = build_tokenizer(llava=True)
    text = _text(tokenizer, 448)
    vision = CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=4,
        image_size=TILE,
        patch_size=24,
        hidden_act="gelu",
    )
    config = LlavaNextConfig(
        vision_config=vision,
        text_config=MistralConfig(
            **text,
            sliding_window=None,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=PINPOINTS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
        dtype=dtype,
    )
    images = LlavaNextImageProcessor(
        size={"shortest_edge": TILE},
        crop_size={"height": TILE, "width": TILE},
        image_grid_pinpoints=PINPOINTS,
        image_mean=PIXELS["mean"],
        image_std=PIXELS["std"],
    )
    processor = LlavaNextProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=24,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=chat_template(llava=True),
    )
    return Pocket("pocket-llava", LlavaNextForConditionalGeneration(config), processor)


def _pocket_omni(dtype: torch.dtype) -> Pocket:
    tokenizer = build_tokenizer(llava=False)
    token = tokenizer.convert_tokens_to_ids
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 112}
    audio = {
        "num_mel_bins": 128,
        "encoder_layers": 3,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 512,
        "d_model": 128,
        "output_dim": HIDDEN,
        "downsample_hidden_size": 32,
        "max_source_positions": 100,
    }
    # Released configurations say so and vLLM asks for it; transformers does not.
    released = {"image_size": 256, "apply_vit_abs_pos_embed": True}
    thinker = {
        "audio_config": audio,
        "vision_config": _vision(4, 96, [1]) | released,
        "text_config": _text(tokenizer, 224) | experts | _mrope(),
        "audio_token_id": token("<|audio_pad|>"),
        "image_token_id": token("<|image_pad|>"),
        "video_token_id": token("<|video_pad|>"),
        "audio_start_token_id": token("<|audio_start|>"),
        "audio_end_token_id": token("<|audio_end|>"),
        "vision_start_token_id": token("<|vision_start|>"),
        "position_id_per_seconds": 13,
        "user_token_id": token("user"),
        "tie_word_embeddings": False,
    }
    config = Qwen3OmniMoeConfig(
        thinker_config=thinker,
        enable_audio_output=False,
        im_start_token_id=token("<|im_start|>"),
        im_end_token_id=token("<|im_end|>"),
        system_token_id=token("system"),
        user_token_id=token("user"),
        assistant_token_id=token("assistant"),
        dtype=dtype,
    )
    processor = Qwen3OmniMoeProcessor(
        tokenizer=tokenizer,
        feature_extractor=WhisperFeatureExtractor(feature_size=128, return_attention_mask=True),
        chat_template=chat_template(llava=False),
        **_qwen_media(),
    )
    return Pocket("pocket-omni", Qwen3OmniMoeForConditionalGeneration(config), processor)


BUILDERS = {
    "pocket-vl": _pocket_vl,
    "pocket-llava": _pocket_llava,
    "pocket-omni": _pocket_omni,
}


def build(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Pocket:
    """A pocket model from scratch.

    Args:
        name: one of NAMES.
        seed: seed of the weights.
        dtype: dtype of the weights.

    Raises:
        KeyError: an unknown name.
    """
    pocket = BUILDERS[name](dtype)
    initialize(pocket.model, seed)
    pocket.model.to(dtype)
    tokenizer = pocket.processor.tokenizer
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    for part in {pocket.model, pocket.generator}:
        part.generation_config = GenerationConfig(do_sample=False, **ends)
    return pocket


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Draw weights: linear maps keep the size of their input, smaller ones write into residuals."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            if name.endswith("weight"):  # of a norm
                weight.fill_(1.0)
            elif "image_newline" in name or "class_embedding" in name:
                weight.normal_(std=0.3, generator=generator)
            else:
                weight.zero_()
        else:
            weight.normal_(std=_std(name, weight), generator=generator)


# The layers that write into a residual stream, in any of the towers.
OUTPUTS = ("o_proj", "down_proj", "attn.proj", "linear_fc2", "out_proj", "fc2")


def _std(name: str, weight: nn.Parameter) -> float:
    inputs = weight.shape[-1] if "experts" in name else weight[0].numel()
    if "embed_tokens" in name:
        return 0.7
    if "pos_embed" in name or "position_embedding" in name:
        return 0.3
    if "lm_head" in name:
        return 0.5 * inputs**-0.5
    if "conv2d" in name:
        return (2 / inputs) ** 0.5  # a GELU follows
    if any(f"{output}." in f"{name}." for output in OUTPUTS) and "merger" not in name:
        return (inputs * 8) ** -0.5
    return inputs**-0.5
