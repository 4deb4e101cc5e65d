"""Prompt tables: fixed-address tables with which a CUDA graph stores complete prompts."""

from __future__ import annotations

import numpy as np
import torch

from oscar_mm.cache.step_plan import AttentionShape, SlotTables, StepPlan, store_jobs
from oscar_mm.cache.window_pages import WindowPages
from oscar_mm.modality import Modality
from oscar_mm.ops.decode_tables import Tables, laid_out, upload
from oscar_mm.ops.store_torch import CENTER_TOKENS, HEAD, NOTHING, TILE
from oscar_mm.pages.codecs.registry import codec_of
from oscar_mm.pages.layout import PAGE_TOKENS
from oscar_mm.policy import Bits, KVPolicy

_MORE_TILES = 64
"""Additional tiles for tokens that precede a prompt and are still in 16-bit precision."""


class PromptTables:
    """Tables that store the tokens of up to ``rows`` prompts.

    All tables are parts of one tensor, so that a step needs one copy. Unused entries have page or
    slot -1.

    Args:
        tokens: maximum number of tokens of all prompts.
        rows: maximum number of prompts.
        policy: policy of the caches; ``takes_policy`` must accept it.
        device: device of the layers.
    """

    packs_at_end = False

    def __init__(self, tokens: int, rows: int, policy: KVPolicy, device: torch.device) -> None:
        self._bits = list(policy.packed_bits)
        streams = len(Modality) * rows
        # Tokens of earlier turns leave the window, at most a few hundred.
        jobs = -(-tokens // TILE) + _MORE_TILES + 2 * streams, HEAD + TILE
        begins = (-(-tokens // PAGE_TOKENS) + streams) * policy.center, HEAD + CENTER_TOKENS
        shapes = [(tokens, 3), *((jobs, begins) if self._bits else ())]
        self._shapes = [shapes[0], *(len(self._bits) * [*shapes[1:]])]
        sizes = [lines * columns for lines, columns in self._shapes]
        with torch.inference_mode(False):
            self._whole = torch.full((sum(sizes),), NOTHING, dtype=torch.int32, device=device)
        parts = self._whole.split(sizes)
        self._tables = [part.view(x) for part, x in zip(parts, self._shapes, strict=True)]

    @staticmethod
    def takes_policy(policy: KVPolicy) -> bool:
        """Return whether pages can receive tokens one by one, so that the same launches store a
        prompt of any length."""
        return not policy.packed_bits or codec_of(policy).appends_tokens

    def write(self, step: StepPlan, start: int) -> bool:
        """Write the tables of a step; return whether they have enough capacity.

        Args:
            step: plan of the prompts; ``lengths`` is set.
            start: index of the first prompt's first token in the keys and values that layers store.
        """
        found = [np.zeros((0, 3), np.int32) if step.writes is None else step.writes.T]
        for bits in self._bits:
            jobs = [job for job in step.pack_jobs if job.bits == bits]
            found += [store_jobs(jobs)] if jobs else [np.zeros((0, HEAD + TILE), np.int32)]
            found += [_beginnings([job.beginnings() for job in jobs])]
        if any(len(x) > shape[0] for x, shape in zip(found, self._shapes, strict=True)):
            return False
        tables = [np.full(shape, NOTHING, np.int32) for shape in self._shapes]
        for table, lines in zip(tables, found, strict=True):
            table[: len(lines)] = lines
        writes, *others = tables
        writes[: len(found[0]), 1] += start
        for table in others:
            tokens = table[:, HEAD:]
            np.add(tokens, start, out=tokens, where=tokens >= 0)
        self._whole.copy_(upload(laid_out(tuple(tables)), self._whole.device))
        return True

    def tables(self, step: StepPlan, attention: AttentionShape, device: torch.device) -> Tables:
        """Raise RuntimeError: complete prompts attend to no pages."""
        raise RuntimeError("complete prompts attend to no pages")

    def writes(self, device: torch.device) -> torch.Tensor:
        """Return the table of writes, see ``StepPlan.writes_on``."""
        return self._tables[0]

    def slots(
        self, device: torch.device, places: WindowPages | None = None
    ) -> dict[Bits, SlotTables]:
        """Return the tables of ``StepPlan.slots_on``, without those for sliding windows."""
        assert places is None, "prompts of models with sliding windows are not captured"
        pairs = self._tables[1::2], self._tables[2::2]
        return {
            bits: SlotTables(jobs, begins)
            for bits, jobs, begins in zip(self._bits, *pairs, strict=True)
        }


def _beginnings(found: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros((0, HEAD + CENTER_TOKENS), np.int32), *found])
