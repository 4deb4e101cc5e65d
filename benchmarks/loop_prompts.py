"""Prompts of the client loop: pictures that no other request has, then a text of given length."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.random_model import FAMILIES, RANDOM_MODELS, words
from oscar_mm.engine.message import Message, first_turn
from oscar_mm.media.part import media_parts

SIDE = 512
"""Width and height of a picture in pixels."""
_TEXTS = 12
"""Number of different texts of a load; requests take them in turn."""


def texts(length: Callable[[str], int], tokens: int) -> list[str]:
    """Return texts of as few words as make prompts of at least ``tokens`` tokens.

    Args:
        length: function that returns the number of tokens of a prompt with a text.
        tokens: minimum number of tokens of a prompt without pictures.
    """
    found = list[str]()
    for seed in range(_TEXTS):
        text = words(2 * tokens, seed).split()
        least = bisect_left(range(len(text)), tokens, key=lambda n: length(" ".join(text[:n])))
        found.append(" ".join(text[:least]))
    return found


def pictures(number: int, count: int) -> list[Image.Image]:
    """Return ``count`` pictures of random pixels, different ones for each number."""
    generator = np.random.default_rng(number)
    return [
        Image.frombytes("RGB", (SIDE, SIDE), generator.bytes(3 * SIDE * SIDE)) for _ in range(count)
    ]


def asked(number: int, text: str, count: int = 0) -> list[Message]:
    """Return the question of a request: ``count`` pictures, then its number and a text.

    No two questions begin alike, so that no prefix is shared.
    """
    return first_turn(f"{number:06} {text}", media_parts(pictures(number, count)))


class VLLMPrompts:
    """Prompts with pictures for vLLM, of the same tokens as those of our engine.

    Attributes:
        folder: folder with the model's config.json and its processor, from which vLLM makes a model
            with random weights.
    """

    def __init__(self, model: str, folder: Path) -> None:
        """Write the folder of a model.

        Args:
            model: key of ``RANDOM_MODELS``, with weights in 16 bits.
            folder: folder to write to.
        """
        released = RANDOM_MODELS[model]
        architecture, config, self._processor = FAMILIES[released.family](released)
        self.folder = folder
        self._processor.save_pretrained(folder)
        config.architectures, config.dtype = [architecture.__name__], torch.bfloat16
        config.save_pretrained(folder)

    def prompt(self, number: int, text: str, count: int) -> dict[str, Any]:
        """Return a question as in ``asked``, in vLLM's form."""
        content = [{"type": "image"}] * count + [{"type": "text", "text": f"{number:06} {text}"}]
        written = self._processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True
        )
        return {"prompt": written, "multi_modal_data": {"image": pictures(number, count)}}

    def tokens(self, text: str, count: int = 0) -> int:
        """Return the number of tokens of a question, with those of its pictures."""
        question = self.prompt(0, text, count)
        shown = question["multi_modal_data"]["image"] or None
        return len(self._processor(text=[question["prompt"]], images=shown)["input_ids"][0])

    def options(self, count: int) -> dict[str, Any]:
        """Return arguments for ``vllm.LLM``, for prompts of ``count`` pictures."""
        return {
            "skip_tokenizer_init": False,
            "limit_mm_per_prompt": {
                "image": {"count": count, "width": SIDE, "height": SIDE},
                "video": 0,
            },
            "mm_processor_cache_gb": 0,  # No picture recurs.
        }
