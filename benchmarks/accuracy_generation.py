"""The same conversations through the real cache: packed attention, batches, free answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.tasks import Conversations, Task, conversations
from examples.train_pocket.configs import Pocket
from examples.train_pocket.studio import Studio
from oscar_mm import KVPolicy, OscarCache
from oscar_mm.compare.forced import IGNORE
from oscar_mm.compare.methods import DEFAULT, REFERENCE
from oscar_mm.generation.decode_loop import decode
from oscar_mm.generation.prompt import Prompt
from oscar_mm.generation.sampling import Sampling
from oscar_mm.modality import PADDING

POLICIES = {REFERENCE: KVPolicy.preset("bf16"), DEFAULT: KVPolicy.preset(DEFAULT)}
_ROOM = 8
"""Tokens that an answer may be longer than the right one."""


def generate(
    studio: Studio, pocket: Pocket, tasks: Sequence[Task], prompts: int, seed: int
) -> Iterator[dict[str, Any]]:
    """A row for each task and policy: exact match of greedy answers of a batch of conversations.

    The media are a first turn, question and answer a second one, so that both read the packed
    cache.

    Args:
        studio: makes the conversations.
        pocket: answers them; the same model in any dtype.
        tasks: with one question for a conversation.
    """
    device = studio.writer.device
    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    ends = frozenset([pocket.processor.tokenizer.eos_token_id])
    for task in tasks:
        found: dict[str, list[list[int]]] = {method: [] for method in POLICIES}
        expected: list[list[int]] = []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            for talks in conversations(studio, task, prompts):
                expected += _answers(talks)
                for method, policy in POLICIES.items():
                    found[method] += answered(pocket, talks, policy, ends)
        for method, answers in found.items():
            yield {
                "task": task.name,
                "family": task.family,
                "condition": "generated",
                "method": method,
                "prompts": len(answers),
                "exact": _share(answers, expected),
                "as_16_bit": _share(answers, found[REFERENCE]),
            }


@torch.inference_mode()
def answered(
    pocket: Pocket, talks: Conversations, policy: KVPolicy, end_tokens: frozenset[int]
) -> list[list[int]]:
    """Greedy answers, as token ids, of all rows at once."""
    model, rows = pocket.generator, len(talks.forced.ids)
    cache = OscarCache(policy)
    cache.expect(talks.ids.expand(rows, -1))
    model.get_decoder()(**talks.prefix_in(model.dtype), past_key_values=cache, use_cache=True)
    longest = max(map(len, _answers(talks))) + _ROOM
    sampling = Sampling(max_new_tokens=longest, temperature=0)
    answers: list[list[int]] = [[] for _ in range(rows)]
    for step in decode(model, _question(talks), cache, sampling, end_tokens=end_tokens):
        for row, token in enumerate(step):
            if token is not None:
                answers[row].append(token)
    return answers


def _question(talks: Conversations) -> Prompt:
    """The rows' questions as one turn, padded on the left."""
    forced = talks.forced
    # Up to the first token after which an answer's token is judged.
    counts = (forced.targets != IGNORE).int().argmax(1) + 1
    longest = int(counts.max())
    place = torch.arange(longest, device=counts.device) - (longest - counts)[:, None]
    real, place = place >= 0, place.clamp(min=0)
    positions = forced.positions.gather(-1, place.expand(*forced.positions.shape[:-1], longest))
    last = positions[..., -1] if positions.ndim == 2 else positions[0, :, -1]
    return Prompt(
        inputs={"input_ids": forced.ids.gather(1, place)},
        positions=positions,
        next_position=last + 1,
        modalities=torch.where(real, 0, PADDING).to("cpu", torch.int8),
    )


def _answers(talks: Conversations) -> list[list[int]]:
    """The right answers without the token that ends them."""
    rows: list[Tensor] = [target[target != IGNORE] for target in talks.forced.targets.cpu()]
    return [row[:-1].tolist() for row in rows]


def _share(found: Sequence[list[int]], wanted: Sequence[list[int]]) -> float:
    same = [one == other for one, other in zip(found, wanted, strict=True)]
    return sum(same) / len(same)
