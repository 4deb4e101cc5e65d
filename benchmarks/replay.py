"""Forward passes of a pipeline, recorded as it answers, and repeated with any cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import Cache

from oscar_mm import OscarCache
from oscar_mm.decoding.pieces import in_pieces
from oscar_mm.modality import token_modalities

_NOT_INPUTS = ("past_key_values", "use_cache", "logits_to_keep")


@dataclass(frozen=True)
class Call:
    """One forward pass of a model that generates.

    Attributes:
        inputs: tensors that it was given.
        logits: (vocabulary,) float32 on the CPU, of the last token.
    """

    inputs: dict[str, torch.Tensor]
    logits: torch.Tensor

    @property
    def tokens(self) -> int:
        """New tokens."""
        return self.inputs["input_ids"].shape[1]


@contextmanager
def recorded(model: Any) -> Iterator[list[Call]]:
    """Inside, what the model reads is added to the list: prompts and later turns.

    Decode steps are not: a CUDA graph may take them without a word. See ``with_steps``.
    """
    calls: list[Call] = []

    def note(_: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if kwargs["input_ids"].shape[1] == 1:
            return
        inputs = {
            name: value
            for name, value in kwargs.items()
            if isinstance(value, torch.Tensor) and name not in _NOT_INPUTS
        }
        calls.append(Call(inputs, _last(output)))

    hook = model.register_forward_hook(note, with_kwargs=True)
    try:
        yield calls
    finally:
        hook.remove()


def with_steps(calls: Sequence[Call], answers: Sequence[Sequence[int]]) -> list[Call]:
    """Every call, and after it the decode steps of its answer, one for each token but the last.

    The logits of the steps are those of the call before them.
    """
    found = []
    for call, tokens in zip(calls, answers, strict=True):
        found.append(call)
        places = call.inputs["position_ids"]
        # The first of several rows counts tokens, the others are time, height and width.
        following = (places[1:] if places.ndim == 3 else places).amax() + 1
        for index, token in enumerate(tokens[:-1]):
            inputs = {
                "input_ids": torch.full_like(call.inputs["input_ids"][:, :1], token),
                "position_ids": (following + index).expand(*places.shape[:-1], 1),
            }
            found.append(Call(inputs, call.logits))
    return found


@torch.inference_mode()
def replay(model: Any, calls: Sequence[Call], cache: Cache) -> tuple[list[float], list[Call]]:
    """Repeat the calls, one after the other, on a cache; with an OscarCache as pipelines do.

    Returns:
        seconds of each, to the choice of a token; and the calls as they went now.
    """
    seconds, found = [], []
    for call in calls:
        ours = isinstance(cache, OscarCache)
        if ours:
            cache.expect(token_modalities(call.inputs["input_ids"], config=model.config))
        _wait(call.inputs["input_ids"].device)
        start = perf_counter()
        with in_pieces(model, call.inputs["input_ids"].numel() if ours else 0):
            output = model(**call.inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        output.logits[0, -1].argmax().item()
        seconds.append(perf_counter() - start)
        found.append(Call(call.inputs, _last(output)))
    return seconds, found


def joined(family: Any, calls: Sequence[Call]) -> Call:
    """All calls as one: the whole conversation read afresh. Its logits are the last call's."""
    together: dict[str, torch.Tensor] = {}
    for name in {name: None for call in calls for name in call.inputs}:
        parts = [call.inputs[name] for call in calls if name in call.inputs]
        if name in ("input_ids", "position_ids"):
            together[name] = torch.cat(parts, dim=-1)
        else:
            together[name] = family.join_media(name, parts)
    return Call(together, calls[-1].logits)


def difference(found: Call, expected: Call) -> float:
    """|found - expected| / |expected| of the logits."""
    return float((found.logits - expected.logits).norm() / expected.logits.norm())


def step_ms(seconds: Sequence[float]) -> float:
    """Median of decode steps, in milliseconds."""
    return 1e3 * median(seconds)


def _last(output: Any) -> torch.Tensor:
    return output.logits[0, -1].float().cpu()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
