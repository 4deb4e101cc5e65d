"""Folders of LoRA adapters for tiny checkpoints, and what PEFT's own modules make of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText

from oscar_mm.pipelines.weight_formats import quantize
from tests.prompts import Reference, Request

ADAPTERS: dict[str, dict[str, Any]] = {
    "towers": {"r": 4, "lora_alpha": 40, "target_modules": ["q_proj", "v_proj", "up_proj", "qkv"]},
    "decoder": {
        "r": 6,
        "lora_alpha": 60,
        "use_rslora": True,
        "rank_pattern": {"o_proj": 3},
        "target_modules": r".*language_model.*\.(q|k|v|o|gate|up|down)_proj",
    },
}


def base_model(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def save_adapter(checkpoint: Path, folder: Path, seed: int = 0, **fields: Any) -> Path:
    """Write a random adapter of a checkpoint."""
    import peft

    torch.manual_seed(seed)
    config = peft.LoraConfig(init_lora_weights=False, **fields)
    peft.get_peft_model(base_model(checkpoint), config).save_pretrained(folder)
    return folder


def saved_adapters(checkpoint: Path, folder: Path) -> dict[str, Path]:
    """Write the adapters of ``ADAPTERS``; return their folders."""
    return {
        name: save_adapter(checkpoint, folder / name, seed, **fields)
        for seed, (name, fields) in enumerate(ADAPTERS.items())
    }


class PeftReference:
    """A checkpoint in plain transformers with one adapter in PEFT's own modules, or none.

    Args:
        weights: "fp8" or "int4" for quantized weights of the decoder.
    """

    def __init__(self, checkpoint: Path, adapters: Mapping[str, Path], weights: str | None) -> None:
        self._reference, self._adapters = Reference(checkpoint), adapters
        if weights is not None:
            model = self._reference.model
            quantize(model, model.get_decoder(), weights)
        self._base = self._reference.model

    def answer(
        self, adapter: str | None, request: Request, count: int
    ) -> tuple[list[int], list[float]]:
        """Greedy tokens of one adapter alone, and the logarithm of the probability of each."""
        import peft

        model = copy.deepcopy(self._base)
        if adapter is not None:
            model = peft.PeftModel.from_pretrained(model, str(self._adapters[adapter])).eval()
        inputs = self._reference.inputs([request])
        how = {"output_logits": True, "return_dict_in_generate": True, "do_sample": False}
        made = model.generate(**inputs, max_new_tokens=count, eos_token_id=-1, **how)
        tokens = made.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        rows = torch.cat(made.logits).float().log_softmax(-1)
        return tokens, rows[range(count), tokens].tolist()


def tokens_of(answers: Sequence[Any]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]
