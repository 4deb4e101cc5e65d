"""Prompts that a pipeline has read, recorded as it answers, and read again with any cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from transformers import Cache

from oscar_mm import OscarCache
from oscar_mm.decoding import loop
from oscar_mm.decoding.loop import read
from oscar_mm.decoding.prompt import Prompt, forward
from oscar_mm.modality import Modality


@dataclass(frozen=True)
class Call:
    """What a model was asked to read, and its answer.

    Attributes:
        prompt: a first or a later turn, or a token of an answer.
        logits: (vocabulary,) float32 on the CPU, of the last token.
    """

    prompt: Prompt
    logits: torch.Tensor

    @property
    def tokens(self) -> int:
        """New tokens."""
        return self.prompt.tokens


@contextmanager
def recorded(model: Any) -> Iterator[list[Call]]:
    """Inside, what the model reads is added to the list: prompts and later turns.

    Decode steps are not: a CUDA graph may take them without a word. See ``with_steps``.
    """
    calls: list[Call] = []

    def noted(reader: Any, prompt: Prompt, *arguments: Any) -> torch.Tensor:
        logits = read(reader, prompt, *arguments)
        if reader is model:
            calls.append(Call(prompt, logits[0].float().cpu()))
        return logits

    with patch.object(loop, "read", noted):
        yield calls


def with_steps(calls: Sequence[Call], answers: Sequence[Sequence[int]]) -> list[Call]:
    """Every call, and after it the decode steps of its answer, one for each token but the last.

    The logits of the steps are those of the call before them.
    """
    found = []
    for call, tokens in zip(calls, answers, strict=True):
        steps = [_step(call.prompt, index, token) for index, token in enumerate(tokens[:-1])]
        found += [call, *(Call(step, call.logits) for step in steps)]
    return found


def _step(prompt: Prompt, index: int, token: int) -> Prompt:
    ids = torch.full_like(prompt.inputs["input_ids"][:, :1], token)
    return Prompt(
        inputs={"input_ids": ids},
        positions=prompt.positions_after(index + 1)[..., index:],
        next_position=prompt.next_position + index + 1,
        modalities=torch.full(ids.shape, int(Modality.TEXT), dtype=torch.int8),
    )


@torch.inference_mode()
def replay(
    model: Any, calls: Sequence[Call], cache: Cache, prefill_chunk: int | None = None
) -> tuple[list[float], list[Call]]:
    """Repeat the calls, one after the other, on a cache; with an OscarCache as pipelines do.

    Returns:
        seconds of each, from what shows media on the CPU to the choice of a token; and the calls
        as they went now.
    """
    seconds, found = [], []
    for call in calls:
        prompt = call.prompt
        _wait(prompt.positions.device)
        start = perf_counter()
        if isinstance(cache, OscarCache):
            logits = read(model, prompt, cache, prefill_chunk)
        else:
            logits = forward(model, prompt, cache)
        logits[0].argmax().item()
        seconds.append(perf_counter() - start)
        found.append(Call(prompt, logits[0].float().cpu()))
    return seconds, found


def tensors_on(device: torch.device, calls: Sequence[Call]) -> list[torch.Tensor]:
    """Inputs and positions of the calls that lie on such a device."""
    tensors = [x for call in calls for x in (*call.prompt.inputs.values(), call.prompt.positions)]
    return [tensor for tensor in tensors if tensor.device.type == device.type]


def joined(family: Any, calls: Sequence[Call]) -> Call:
    """All calls as one: the whole conversation read afresh. Its logits are the last call's."""
    prompts = [call.prompt for call in calls]
    together: dict[str, torch.Tensor] = {}
    for name in {name: None for prompt in prompts for name in prompt.inputs}:
        parts = [prompt.inputs[name] for prompt in prompts if name in prompt.inputs]
        ids = name == "input_ids"
        together[name] = torch.cat(parts, dim=-1) if ids else family.join_media(name, parts)
    whole = Prompt(
        inputs=together,
        positions=torch.cat([prompt.positions for prompt in prompts], dim=-1),
        next_position=prompts[-1].next_position,
        modalities=torch.cat([prompt.modalities for prompt in prompts], dim=-1),
    )
    return Call(whole, calls[-1].logits)


def difference(found: Call, expected: Call) -> float:
    """|found - expected| / |expected| of the logits."""
    return float((found.logits - expected.logits).norm() / expected.logits.norm())


def step_ms(seconds: Sequence[float]) -> float:
    """Median of decode steps, in milliseconds."""
    return 1e3 * median(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
