"""Replay: prompts that a pipeline reads are recorded and read again with any cache."""

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
from oscar_mm.generation import prompt_reader
from oscar_mm.generation.decode_loop import read_prompt
from oscar_mm.generation.prompt import Prompt, forward
from oscar_mm.modality import Modality


@dataclass(frozen=True)
class Call:
    """A prompt that a model reads, and the logits that it gives.

    Attributes:
        prompt: a first or a later turn, or a token of an answer.
        logits: (vocabulary,) float32 on the CPU, of the last token.
    """

    prompt: Prompt
    logits: torch.Tensor

    @property
    def tokens(self) -> int:
        """Number of new tokens."""
        return self.prompt.tokens


@contextmanager
def record_calls(model: Any) -> Iterator[list[Call]]:
    """Inside, the list gets each prompt and later turn that the model reads.

    It gets no decode steps, which a CUDA graph may run unseen; ``with_steps`` adds them.
    """
    calls: list[Call] = []

    def read_and_record(reader: Any, prompt: Prompt, *arguments: Any) -> torch.Tensor:
        logits = read_prompt(reader, prompt, *arguments)
        if reader is model:
            calls.append(Call(prompt, logits[0].float().cpu()))
        return logits

    with patch.object(prompt_reader, "read_prompt", read_and_record):
        yield calls


def with_steps(calls: Sequence[Call], answers: Sequence[Sequence[int]]) -> list[Call]:
    """The calls, each followed by the decode steps of its answer, one for each token but the last.

    Steps have the logits of the call before them.
    """
    passes = []
    for call, tokens in zip(calls, answers, strict=True):
        steps = [_step(call.prompt, index, token) for index, token in enumerate(tokens[:-1])]
        passes += [call, *(Call(step, call.logits) for step in steps)]
    return passes


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
    """Repeat the calls one after the other on a cache; an OscarCache reads as pipelines do.

    Returns:
        seconds of each call, from media on the CPU to the choice of a token; and the calls with
        their new logits.
    """
    seconds, repeated = [], []
    for call in calls:
        prompt = call.prompt
        _wait(prompt.positions.device)
        start = perf_counter()
        if isinstance(cache, OscarCache):
            logits = read_prompt(model, prompt, cache, prefill_chunk)
        else:
            logits = forward(model, prompt, cache)
        logits[0].argmax().item()
        seconds.append(perf_counter() - start)
        repeated.append(Call(prompt, logits[0].float().cpu()))
    return seconds, repeated


def tensors_on(device: torch.device, calls: Sequence[Call]) -> list[torch.Tensor]:
    """Inputs and positions of the calls on a kind of device."""
    tensors = [x for call in calls for x in (*call.prompt.inputs.values(), call.prompt.positions)]
    return [tensor for tensor in tensors if tensor.device.type == device.type]


def join_calls(family: Any, calls: Sequence[Call]) -> Call:
    """All calls as one that reads the conversation afresh, with the logits of the last call."""
    prompts = [call.prompt for call in calls]
    inputs: dict[str, torch.Tensor] = {}
    for name in {name: None for prompt in prompts for name in prompt.inputs}:
        parts = [prompt.inputs[name] for prompt in prompts if name in prompt.inputs]
        ids = name == "input_ids"
        inputs[name] = torch.cat(parts, dim=-1) if ids else family.join_media(name, parts)
    conversation = Prompt(
        inputs=inputs,
        positions=torch.cat([prompt.positions for prompt in prompts], dim=-1),
        next_position=prompts[-1].next_position,
        modalities=torch.cat([prompt.modalities for prompt in prompts], dim=-1),
    )
    return Call(conversation, calls[-1].logits)


def difference(call: Call, expected: Call) -> float:
    """Relative difference of the logits, |call - expected| / |expected|."""
    return float((call.logits - expected.logits).norm() / expected.logits.norm())


def step_ms(seconds: Sequence[float]) -> float:
    """Median of decode steps, in milliseconds."""
    return 1e3 * median(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
