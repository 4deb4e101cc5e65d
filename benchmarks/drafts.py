"""Time decode steps of one sequence whose drafts are right with a given probability.

python -m benchmarks.drafts [--models qwen3.5-9b] [--contexts 2048] [--drafts 1,2,3] [--right 0.7]

Weights are random, so real drafts would always be wrong. All work of drafts is done, but whether a
draft counts as right is drawn at random.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from time import perf_counter

import numpy as np
import torch

from benchmarks.cache_variants import VARIANTS, Decoder, Oscar
from benchmarks.decode_step import WARM_UP, DecodeLoop, numbers, options_of, step_ms, sweep
from benchmarks.profiling import allocated, release
from benchmarks.record import Row, now, show
from oscar_mm import OscarCache
from oscar_mm.engine.sampling import Sampler
from oscar_mm.fast_decode.draft_runner import DraftRunner
from oscar_mm.fast_decode.drafts import Drafts
from oscar_mm.fast_decode.graph_runner import GraphRunner
from oscar_mm.ops.decode_tables import upload
from oscar_mm.tensor_parallel import TPGroup

CONTEXTS, TINY_CONTEXTS, COUNTS = (2048,), (300,), (1, 2, 3)
PASSES = 100
BOUND = 1.5
"""Minimum ratio of tokens per second, with the best number of drafts, to those without drafts."""
_STD = 0.02
NOTES = [
    "Random weights of the released shapes; caches are filled with random keys and values. "
    "drafts 0: the decode loop of benchmarks.decode_step. Otherwise the tokens of "
    f"{PASSES} passes divided by their time, which runs from tokens on the host to the next ones "
    "there and includes ordinary steps where no pass can be planned ahead.",
]


class DraftLoop:
    """Greedy passes with drafts of one sequence.

    Args:
        decoder: decoder with a draft module.
        variant: kind of the cache.
        context: tokens before the first pass.
        count: drafts of a pass.
        right: probability with which a draft counts as right.
    """

    def __init__(
        self, decoder: Decoder, variant: Oscar, context: int, count: int, right: float
    ) -> None:
        self._cache = OscarCache(variant.policy, model=decoder.model)
        room = variant.slots(context, (2 * WARM_UP + PASSES) * (1 + count))
        variant.store_prompt(self._cache, decoder, 1, context, room)
        model, where = decoder.model, (decoder.axes, decoder.device)
        self._passes = DraftRunner(model, self._cache, *where, count)
        self._steps = GraphRunner(model, self._cache, 1, *where)
        self._choose = Sampler([None] * (1 + count), decoder.device, TPGroup())
        self._once = Sampler([None], decoder.device, TPGroup())
        self._random, self._right, self._count = random.Random(0), right, count
        self._device, self._token, self._position = decoder.device, 1, context

    def step(self) -> int:
        """Run a pass, and return the number of its tokens."""
        verified = self._passes(self._token, self._position)
        if verified is None:
            self.ordinary_step()
            return 1
        drafts = verified.tokens.to("cpu", non_blocking=True)
        chosen, accepted = self._choose(verified.logits), 0
        while accepted < self._count and self._random.random() < self._right:
            accepted += 1
        # Otherwise, only the device would know the number now.
        right = upload(np.array([accepted]), self._device)
        self._passes.launch_following(chosen.tokens, right)
        self._token = chosen.listed()[accepted]
        drafts.tolist()
        self._position += 1 + accepted
        self._passes.finish(accepted, self._token)
        return 1 + accepted

    def ordinary_step(self) -> None:
        """Run a step without drafts."""
        self._steps.place([self._position])
        ids = torch.tensor([self._token], device=self._device)
        [self._token] = self._once(self._steps(ids, torch.zeros(1, dtype=torch.bool))).listed()
        self._position += 1


def add_random_drafts(decoder: Decoder) -> None:
    """Attach a draft module with random weights to a decoder."""
    inner = decoder.model.get_decoder()
    with torch.device(decoder.device):
        drafts = Drafts(inner)
    for weight in drafts.parameters():
        torch.nn.init.normal_(weight, std=_STD)
    drafts = drafts.to(inner.norm.weight.dtype).eval()
    drafts.attach(inner, decoder.model.get_output_embeddings())
    decoder.attentions.append(drafts.layers[0].self_attn)


def rows_of(decoder: Decoder, options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each context and number of drafts, beginning with none."""
    variant = VARIANTS["compact-graph"]
    assert isinstance(variant, Oscar)
    decoder.model.set_attn_implementation({"text_config": variant.attention})
    for count in (0, *options.drafts):
        if count and Drafts.of(decoder.model) is None:
            add_random_drafts(decoder)
        for context in options.contexts:
            row = {"model": decoder.name, "context": context, "drafts": count, "date": now()}
            with torch.inference_mode():
                yield row | _measured(decoder, variant, context, count, options.right)
            release(decoder.device)


def _measured(decoder: Decoder, variant: Oscar, context: int, count: int, right: float) -> Row:
    if not count:
        cache = variant.fill(decoder, 1, context, 60)
        ms, _ = step_ms(DecodeLoop(cache, decoder.device, 1).step)
        return {"ms": ms, "tokens": 1.0, "tokens_per_s": 1e3 / ms, "batch": 1, "way": "ordinary"}
    loop = DraftLoop(decoder, variant, context, count, right)
    for _ in range(WARM_UP):
        loop.ordinary_step()
        loop.step()
    allocated(decoder.device)  # Synchronizes.
    begin = perf_counter()
    tokens = sum(loop.step() for _ in range(PASSES))
    seconds = perf_counter() - begin
    return {
        "ms": 1e3 * seconds / PASSES,
        "tokens": tokens / PASSES,
        "tokens_per_s": tokens / seconds,
        "batch": 1,
        "way": f"{count} drafts",
    }


def report(rows: Sequence[Row]) -> None:
    """Print a table and verdicts."""
    show(
        "Passes with drafts",
        ("model", "context", "drafts", "ms", "tokens", "tokens/s"),
        (
            (
                *(str(x[name]) for name in ("model", "context", "drafts")),
                *(f"{x[name]:.2f}" for name in ("ms", "tokens", "tokens_per_s")),
            )
            for x in rows
        ),
    )
    for cell in dict.fromkeys((x["model"], x["context"]) for x in rows):
        speeds = {
            x["drafts"]: x["tokens_per_s"] for x in rows if (x["model"], x["context"]) == cell
        }
        best = max(speeds.values()) / speeds[0]
        verdict = "met" if best >= BOUND else "NOT met"
        print(f"{cell[0]}, {cell[1]:,}: {best:.2f}x, at least {BOUND}: {verdict}")


def main(arguments: list[str]) -> int:
    """Run the benchmark; return the exit code."""
    parser = options_of("drafts", __doc__, CONTEXTS)
    parser.set_defaults(models=("qwen3.5-9b",))
    parser.add_argument("--drafts", type=numbers, default=COUNTS, help="drafts of a pass")
    parser.add_argument("--right", type=float, default=0.7, help="probability of a right draft")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.contexts = TINY_CONTEXTS
    return sweep(
        "drafts",
        arguments,
        options,
        NOTES,
        lambda decoder, _: rows_of(decoder, options),
        report,
        ("model", "context", "drafts"),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
