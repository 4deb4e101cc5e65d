"""Mixed passes on a CPU: what stands in for graphs and for attention of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from oscar_mm.engine import mixed_prefill
from oscar_mm.engine.mixed_prefill import MixedPrefill
from oscar_mm.engine.request import Request
from oscar_mm.fast_decode import graph_runner, picture_tower, prompt_scratch
from oscar_mm.fast_decode.prompt_scratch import PromptScratch
from oscar_mm.pipelines.pipeline import Pipeline

CAPACITY = 700


class Capture:
    """Capture whose replay runs the function again, in the context of the capture; ``made`` counts
    captures."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, function: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
        self.made += 1
        return partial(copy_context().run, function)


def by_rows(queries, keys, values, run, scaling, output):
    """``causal_varlen`` for a CPU, sequence by sequence; NaN where it must not be read."""
    found = output.fill_(torch.nan)
    ends = zip(run.query_ends.tolist(), run.key_ends.tolist(), strict=True)
    (start, key_start), *ends = ends
    for end, key_end in ends:
        rows, own = queries[start:end], slice(key_start, key_end)
        seen = torch.ones(len(rows), key_end - key_start, dtype=torch.bool)
        seen = seen.tril(key_end - key_start - len(rows))
        sides = (x.transpose(0, 1)[None] for x in (rows, keys[own], values[own]))
        out = scaled_dot_product_attention(*sides, seen, scale=scaling, enable_gqa=True)
        found[start:end] = out[0].transpose(0, 1).nan_to_num() if len(rows) else rows
        start, key_start = end, key_end


def mix(patch: pytest.MonkeyPatch) -> Capture:
    """Make engines mix on a CPU."""
    capture = Capture()
    for module in (graph_runner, mixed_prefill):
        patch.setattr(module, "graph_capture", lambda devices, small=False: capture)
    patch.setattr(prompt_scratch, "can_attend_varlen", lambda queries: True)
    patch.setattr(prompt_scratch, "causal_varlen", by_rows)
    patch.setattr(picture_tower, "can_attend", lambda queries: True)
    patch.setattr(PromptScratch, "capacity", staticmethod(lambda model, levels, device: CAPACITY))
    return capture


@torch.inference_mode()
def read_by_pieces(pipe: Pipeline, requests: list[Request]) -> list[torch.Tensor]:
    """Logits after each prompt, read by ``MixedPrefill`` without decode steps."""
    scheduler = pipe.engine.scheduler
    axes = requests[0].prompt.positions.shape[:-2]
    mixed = MixedPrefill.of(pipe.family, pipe.store, scheduler.reader.sigmas, axes)
    assert mixed is not None and all(mixed.takes(request) for request in requests)
    found = list[torch.Tensor]()
    for request in requests:
        mixed.add(request)
    while (piece := mixed.next_piece(0)) is not None:
        piece.scratch.run_alone(piece)
        count = sum(x.completes for _, x in mixed._ranges)
        found += [row[None] for row in piece.logits[:count].clone()]
        mixed.finish(piece)
    assert not any(one.stored.overflowed() for one in mixed.take_complete())
    return found
