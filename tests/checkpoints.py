"""Tiny models with real processors, as folders that ``from_pretrained`` loads.

python -m tests.checkpoints qwen3_vl FOLDER
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.tiny import randomize
from tests.tiny_llava_next import llava_next
from tests.tiny_qwen2_5_vl import qwen2_5_vl
from tests.tiny_qwen3_5 import qwen3_5
from tests.tiny_qwen3_omni import qwen3_omni
from tests.tiny_qwen3_vl import qwen3_vl

BUILDERS: dict[str, Callable[..., None]] = {
    "llava_next": llava_next,
    "llava_next_vicuna": partial(llava_next, text_model="llama"),
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": partial(qwen3_5, moe=True),
    "qwen3_5_thinking": partial(qwen3_5, thinking=True),
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": partial(qwen3_vl, moe=True),
    "qwen3_vl_thinking": partial(qwen3_vl, thinking=True),
    "qwen3_omni": qwen3_omni,
    "qwen3_omni_talker": partial(qwen3_omni, talker=True),
    "qwen3_omni_calls_talker": partial(qwen3_omni, talker=True, calls=True),
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
        ``from_pretrained`` of the family's model class.
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
        "num_hidden_layers": 2,
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
