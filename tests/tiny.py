"""What the tiny checkpoints share: tokenizers learnt from a page of text, and weights."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from transformers import GenerationConfig, LlamaTokenizer, Qwen2Tokenizer

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

CLIP_VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
    "projection_dim": 32,
}
"""Configuration of a tiny CLIP tower, as LLaVA has it."""


def byte_level_bpe(
    vocab_size: int, words: tuple[str, ...] = ()
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a byte-level BPE which knows every byte, learnt from TEXT.

    Each of ``words`` is one token.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT, *(f"{word}\n" for word in words * 100)], trainer)
    state = json.loads(tokenizer.to_str())["model"]
    return state["vocab"], [tuple(merge) for merge in state["merges"]]


def qwen_tokenizer(
    vocab_size: int,
    special: tuple[str, ...] = QWEN_SPECIAL,
    words: tuple[str, ...] = (),
    **options: Any,
) -> Qwen2Tokenizer:
    """Qwen's tokenizer class over a small vocabulary, the special tokens at its end."""
    vocab, merges = byte_level_bpe(vocab_size - len(special), words)
    return Qwen2Tokenizer(
        vocab=vocab | {token: len(vocab) + place for place, token in enumerate(special)},
        merges=merges,
        unk_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(special),
        model_max_length=65536,
        **options,
    )


def llama_tokenizer(vocab_size: int) -> LlamaTokenizer:
    """Llama's tokenizer class (a space is part of the word after it, unknown text falls to bytes).

    Special tokens are where Llama 2 has them, <image> and <pad> are the last.
    """
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - len(first) - 2, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    state = json.loads(tokenizer.to_str())["model"]
    learnt = sorted(state["vocab"], key=state["vocab"].get)
    return LlamaTokenizer(
        vocab={token: place for place, token in enumerate([*first, *learnt])},
        merges=[tuple(merge) for merge in state["merges"]],
        pad_token="<pad>",
        add_bos_token=True,
        extra_special_tokens=["<image>", "<pad>"],
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
            # States of linear attention last for hundreds of tokens, in some heads.
            center, std = (-4.0, 2.0) if name.endswith("A_log") else (center, std)
        elif "lm_head" in name or "embed_tokens" in name:
            center, std = 0.0, 0.5
        else:
            # Experts are stacked: (experts, out, in).
            inputs = weight.shape[-1] if ".experts." in name else weight[0].numel()
            center, std = 0.0, inputs**-0.5
        with torch.no_grad():
            weight.copy_(center + std * torch.randn(weight.shape, generator=generator))


def save_qwen(model: Any, processor: Any, folder: Path, seed: int) -> None:
    """Randomize a tiny Qwen model and save it with its processor; answers end with <|im_end|>."""
    token_id = processor.tokenizer.convert_tokens_to_ids
    randomize(model, seed)
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=token_id("<|im_end|>"),
        pad_token_id=token_id("<|endoftext|>"),
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
