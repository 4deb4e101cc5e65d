"""A tiny thinking model that says what a test has it say."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from oscar_mm.pipelines.pipeline import Pipeline


def ids_of(pipe: Pipeline, text: str) -> list[int]:
    return pipe.processor.tokenizer(text, add_special_tokens=False)["input_ids"]


@contextmanager
def saying(pipe: Pipeline, *rows: Sequence[int]) -> Iterator[list[torch.Tensor]]:
    """Inside, each row of an answer has these tokens, then the end token; gives the model's own
    logits, step by step."""
    end = next(iter(pipe.family.end_tokens()))
    seen: list[torch.Tensor] = []

    def say(_: Any, __: Any, logits: torch.Tensor) -> torch.Tensor:
        step = len(seen)
        seen.append(logits[:, -1].clone())
        said = torch.zeros_like(logits)
        for row, ids in enumerate(rows):
            said[row, -1, ids[step] if step < len(ids) else end] = 1
        return said

    hook = pipe.model.lm_head.register_forward_hook(say)
    try:
        yield seen
    finally:
        hook.remove()
