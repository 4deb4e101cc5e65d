"""A tiny thinking model that says what a test has it say."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from oscar_mm.engine.sampling import SampledTokens, Sampler, SamplingState
from oscar_mm.pipelines.pipeline import Pipeline


def ids_of(pipe: Pipeline, text: str) -> list[int]:
    return pipe.processor.tokenizer(text, add_special_tokens=False)["input_ids"]


@contextmanager
def saying(pipe: Pipeline, *rows: Sequence[int]) -> Iterator[list[torch.Tensor]]:
    """Make answers within the block consist of these tokens in order, then the end token; yield the
    model's own logits, step by step."""
    end = next(iter(pipe.family.end_tokens()))
    seen: list[torch.Tensor] = []
    order: dict[SamplingState, tuple[Sequence[int], list[int]]] = {}
    init, choose = Sampler.__init__, Sampler.__call__

    def with_samplers(choices: Any, samplers: Any, *rest: Any) -> None:
        init(choices, samplers, *rest)
        choices.samplers = samplers

    def say(choices: Any, logits: torch.Tensor) -> SampledTokens:
        seen.append(logits.clone())
        said = torch.zeros_like(logits)
        for row, sampler in enumerate(choices.samplers):
            ids, steps = order.setdefault(sampler, (rows[len(order) % len(rows)], []))
            said[row, ids[len(steps)] if len(steps) < len(ids) else end] = 100
            steps.append(row)
        return choose(choices, said)

    with patch.object(Sampler, "__init__", with_samplers), patch.object(Sampler, "__call__", say):
        yield seen
