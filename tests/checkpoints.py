"""Tiny models with real processors, as folders that ``from_pretrained`` loads.

python -m tests.checkpoints qwen3_vl FOLDER
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

# What the tokenizer learns its merges from.
TEXT = """
A conversation about pictures grows long. The first picture shows a street with a sign at the
corner, the second one a receipt with seven items and their prices, and the third is a chart of
the rain in each month of the year. The user asks what is written on the sign, then how much the
bread costs, and then which month was the wettest. Each answer needs a picture that was shown many
turns ago, so the model keeps the keys and values of all of them.

What is in this image? Describe the picture in one sentence. Read the text on the sign. How many
people are in the video, and what do they do? Listen to the sound and say who is speaking. There
are two dogs in the garden, one of them is brown and the other is white. The total is 12.50 euros.

The cache holds the keys and the values of every token. With two bits for each number the cache
becomes almost eight times smaller, and the answers should stay the same as before. That is what
the tests compare: the words which are chosen, the scores of the words, and the bytes in memory.
"""

QWEN_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

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


def byte_level_bpe(vocab_size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a byte-level BPE which knows every byte, learnt from TEXT."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    state = json.loads(tokenizer.to_str())["model"]
    return state["vocab"], [tuple(merge) for merge in state["merges"]]


def qwen_tokenizer(vocab_size: int) -> Qwen2Tokenizer:
    """Qwen's tokenizer class over a small vocabulary, the special tokens at its end."""
    vocab, merges = byte_level_bpe(vocab_size - len(QWEN_SPECIAL))
    return Qwen2Tokenizer(
        vocab=vocab | {token: len(vocab) + place for place, token in enumerate(QWEN_SPECIAL)},
        merges=merges,
        unk_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(QWEN_SPECIAL),
        model_max_length=65536,
    )


def randomize(model: nn.Module, seed: int) -> None:
    """Weights such that an untrained model chooses clearly and does not repeat one token.

    The usual init (std 0.02) leaves all logits close to 0 and the residual stream equal to the
    last token. Here every linear map keeps the size of its input, attention is sharp (query norms
    above 1) and the embedding is small beside what the layers add.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            is_norm = "norm" in name and name.endswith("weight")
            center, std = (1.5 if "q_norm" in name else 1.0, 0.1) if is_norm else (0.0, 0.1)
        elif "lm_head" in name or "embed_tokens" in name:
            center, std = 0.0, 0.5
        else:
            # Experts are stacked: (experts, out, in).
            inputs = weight.shape[-1] if ".experts." in name else weight[0].numel()
            center, std = 0.0, inputs**-0.5
        with torch.no_grad():
            weight.copy_(center + std * torch.randn(weight.shape, generator=generator))


def qwen3_vl(folder: Path, *, seed: int, moe: bool = False, **overrides: Any) -> None:
    """Qwen3-VL: deepstack vision tower, interleaved multimodal RoPE, timestamps in videos.

    ``moe`` gives the decoder experts; ``overrides`` go to the text config.
    """
    config_class, model_class = Qwen3VLConfig, Qwen3VLForConditionalGeneration
    if moe:
        config_class, model_class = Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
        overrides = experts | overrides
    tokenizer = qwen_tokenizer(500)
    # At most 64 tokens for an image and as many for a video, so that tests stay quick.
    size = {"shortest_edge": 32 * 32, "longest_edge": 256 * 256}
    video_size = {"shortest_edge": 2 * 32 * 32, "longest_edge": 32 * 64 * 64}
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(patch_size=16, merge_size=2, size=size),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(patch_size=16, merge_size=2, size=video_size),
        chat_template=QWEN3_VL_TEMPLATE,
    )
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
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
    randomize(model, seed)
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=token_id("<|im_end|>"),
        pad_token_id=token_id("<|endoftext|>"),
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


BUILDERS: dict[str, Callable[..., None]] = {
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": partial(qwen3_vl, moe=True),
}


def build(family: str, folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a tiny checkpoint with its processor.

    Args:
        family: a key of BUILDERS.
        folder: made if it is not there.
        seed: of the weights; the same seed gives the same files.
        overrides: fields of the text config, such as ``num_hidden_layers`` or ``head_dim``.

    Returns:
        ``folder``, ready for ``AutoProcessor.from_pretrained`` and
        ``AutoModelForImageTextToText.from_pretrained``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    BUILDERS[family](folder, seed=seed, **overrides)
    return folder


def build_decoder(name: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A tiny text model in memory, float32, in eval mode.

    Args:
        name: "llama", "mistral", "qwen2" (large key biases, which make keys hard to quantize) or
            "qwen3" (normed queries and keys).
        seed: of the weights.
        overrides: config fields.
    """
    fields = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 65536,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    } | overrides
    if name == "mistral":
        fields.setdefault("sliding_window", None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **fields)).float().eval()
    randomize(model, seed)
    if name == "qwen2":
        generator = torch.Generator().manual_seed(seed + 1)
        for layer in model.model.layers:
            bias = layer.self_attn.k_proj.bias
            with torch.no_grad():
                bias.copy_(10 * torch.randn(bias.shape, generator=generator))
    return model


def main() -> None:
    """Command line: family, folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", choices=sorted(BUILDERS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(build(arguments.family, arguments.folder, seed=arguments.seed))


if __name__ == "__main__":
    main()
