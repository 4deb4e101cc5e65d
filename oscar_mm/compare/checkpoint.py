"""Comparison of methods on prompts of any checkpoint that a pipeline reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from oscar_mm.cache.cache import OscarCache
from oscar_mm.compare.divergence import Scores
from oscar_mm.compare.forced import Forced, Recorder, answer_logits, as_recorded
from oscar_mm.compare.methods import Method, StoredPast, bits_per_value
from oscar_mm.compare.paged import Paged
from oscar_mm.generation.decode_loop import decode
from oscar_mm.generation.prompt import Prompt, forward
from oscar_mm.generation.sampling import Sampling
from oscar_mm.policy import KVPolicy

if TYPE_CHECKING:
    from oscar_mm.pipelines.pipeline import Pipeline


class Comparison:
    """Compares methods on a model's own 16-bit answers, prompt by prompt.

    The model reads a prompt once, with exact attention, and answers it with the 16-bit cache. Then,
    for each method, it reads that answer (teacher forcing) over the prompt's keys and values as the
    method restores them, and the next-token distributions are compared with the 16-bit cache's.

    Args:
        pipe: pipeline whose model answers; its own policy plays no part.
        methods: methods to compare.
        max_new_tokens: most tokens of an answer.
    """

    def __init__(self, pipe: Pipeline, methods: Sequence[Method], max_new_tokens: int) -> None:
        self.pipe, self.methods = pipe, methods
        self._sampling = Sampling(max_new_tokens=max_new_tokens, temperature=0)
        self._scores = {method.name: Scores() for method in methods}
        self._missing: dict[str, str] = {}
        # Bytes and values of each prompt, in pages and in a whole cache.
        self._bytes: dict[str, tuple[list, list]] = {method.name: ([], []) for method in methods}
        self._right: dict[str, list[bool]] = {method.name: [] for method in methods}

    @torch.inference_mode()
    def add(self, prompt: Prompt, is_right: Callable[[str], bool] | None = None) -> bool:
        """Compare on one prompt.

        Args:
            prompt: prompt of a single row, from ``Pipeline.prepare``.
            is_right: whether a text is a right answer. With it every method that is a policy also
                answers freely, through the packed cache.

        Returns:
            whether the prompt counts: an empty 16-bit answer says nothing.
        """
        pipe = self.pipe
        recorder = Recorder()
        forward(pipe.model, prompt, recorder.cache)
        layers, ids = recorder.layers, prompt.modalities[0]
        answer = self._answer(prompt, KVPolicy.preset("bf16"))
        if not answer:
            return False
        forced = _forced(prompt, answer)
        exact = answer_logits(pipe.model, as_recorded(layers), prompt.tokens, forced)
        # The 16-bit cache's own choice after each token, the last one included.
        forced.targets.copy_(exact.argmax(-1)[None])
        for method in self.methods:
            if reason := method.missing(layers, ids):
                self._missing[method.name] = reason
                continue
            past = StoredPast(method, layers, ids)
            logits = answer_logits(pipe.model, past, prompt.tokens, forced)
            self._scores[method.name].add(forced, exact, logits)
            pages, cached = self._bytes[method.name]
            pages.append((past.stored_bytes, past.stored_values))
            if (report := method.memory(layers, ids)) is not None:
                cached.append((report.kv_bytes, report.values))
            if is_right is not None and isinstance(method, Paged) and not method.mixed:
                text = pipe.processor.tokenizer.decode(
                    self._answer(prompt, method.policy), skip_special_tokens=True
                )
                self._right[method.name].append(is_right(text))
        return True

    def _answer(self, prompt: Prompt, policy: KVPolicy) -> list[int]:
        """Greedy answer through a packed cache, without its end token."""
        pipe = self.pipe
        cache = OscarCache(policy)
        ends = pipe.family.end_tokens()
        with pipe.lock:
            steps = decode(pipe.model, prompt, cache, self._sampling, end_tokens=ends)
            return [token for token, *_ in steps if token is not None]

    def rows(self) -> list[dict[str, Any]]:
        """One row for each method: "method", bits per value and ``Scores.summary``.

        A method that does not apply to the prompts has "method" and the reason, "missing".
        """
        rows = []
        for method in self.methods:
            if not self._scores[method.name].tokens:
                missing = self._missing.get(method.name, "there were no prompts")
                rows.append({"method": method.name, "missing": missing})
                continue
            pages, cached = (
                [sum(column) for column in zip(*counts, strict=True)]
                for counts in self._bytes[method.name]
            )
            right = self._right[method.name]
            rows.append(
                {
                    "method": method.name,
                    "page_bits": bits_per_value(*pages),
                    "held_bits": bits_per_value(*cached) if cached else None,
                    "right": sum(right) / len(right) if right else None,
                }
                | self._scores[method.name].summary()
            )
        return rows


def _forced(prompt: Prompt, answer: list[int]) -> Forced:
    """The answer's tokens after the prompt, all judged; ``add`` fills in the targets."""
    ids = torch.tensor([answer], device=prompt.inputs["input_ids"].device)
    place = torch.arange(len(answer), device=prompt.next_position.device)
    positions = prompt.next_position[:, None] + place
    return Forced(
        ids=ids,
        positions=positions.expand(*prompt.positions.shape[:-1], -1).to(prompt.positions.device),
        targets=torch.zeros_like(ids),
        answers=torch.zeros_like(ids),
    )
