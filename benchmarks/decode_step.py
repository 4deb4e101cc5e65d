"""A decode step of whole models with random weights: eager, as a CUDA graph, and transformers' own.

python -m benchmarks.decode_step [--models qwen3-vl-8b,...] [--contexts 2048,...] [--batches 1,...]
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import Cache, DynamicCache

from benchmarks.conversation import TINY, Bench, Load
from benchmarks.feed import text_and_images
from benchmarks.record import Record, command, device_name, finish, parser, show
from benchmarks.released import RELEASED
from benchmarks.timing import copy_bandwidth
from oscar_mm import OscarCache
from oscar_mm.decode_steps import DecodeSteps, record_cuda_graph

MODELS = ("qwen3-vl-8b", "llava-1.6-vicuna-7b", "qwen3-omni-30b-a3b")
CONTEXTS, TINY_CONTEXTS = (2048, 32768, 131072), (300,)
BATCHES = (1,)
WARM_UP, STEPS = 8, 16
AT_MOST = 1.3
"""Of a step's floor: the bound for one row, compact, as a graph."""
NOTES = [
    "Random weights of the released shapes; caches are filled with random keys and values of text "
    "and images, the same for all. A step takes a token to the host's choice of the next.",
    "floor: bytes of the decoder's weights (of a mixture the experts that so many tokens are "
    "expected to choose) and of the KV cache as held, by the bandwidth of this run's own copy.",
    f"ms: median of {STEPS} steps after {WARM_UP}. graph: captured, every table written anew.",
]
_PIECE_TOKENS = 1 << 17
_BALANCED_TOKENS = 1024


class Model:
    """A model's decoder, and caches for it.

    Args:
        name: of ``RELEASED``.
        device: where it runs.
        tiny: the same in small.
    """

    def __init__(self, name: str, device: torch.device, *, tiny: bool) -> None:
        released = RELEASED[name].with_positions(1 << 19)
        bench = Bench(released.tiny() if tiny else released, TINY if tiny else Load(), device)
        bench.warm_up()
        self.name, self.device, self.model = name, device, bench.pipe.model
        self.config = self.model.config.get_text_config(decoder=True)
        self.axes = () if released.family == "llava_next" else (4,)
        self.attentions = [
            module for module in self.model.get_decoder().modules() if hasattr(module, "k_proj")
        ]

    def weights(self, rows: int) -> float:
        """Bytes that a step of so many rows reads."""
        total = 0.0
        for name, weight in self.model.named_parameters():
            of_decoder = "visual" not in name and "audio" not in name and "vision" not in name
            if not of_decoder or "embed_tokens" in name or "projector" in name:
                continue
            share = 1.0
            if ".experts." in name:
                most = self.config.num_experts
                share = 1 - (1 - self.config.num_experts_per_tok / most) ** rows
            total += share * weight.nbytes
        return total

    def fill(self, cache: Cache, rows: int, context: int) -> None:
        """Random keys and values in all layers."""
        config = self.config
        heads, head_dim = config.num_key_value_heads, config.head_dim
        packed = isinstance(cache, OscarCache)
        piece = max(_BALANCED_TOKENS, _PIECE_TOKENS // rows)
        for start in range(0, context, piece):
            count = min(piece, context - start)
            if packed:
                cache.expect(text_and_images(context)[start : start + count].expand(rows, count))
                cache.attend_packed(None)
            for index, attention in enumerate(self.attentions):
                generator = torch.Generator(self.device).manual_seed(start + index)

                def normal(many: int, tokens: int, source: torch.Generator = generator):
                    size = (rows, many, tokens, head_dim)
                    how = {"device": self.device, "dtype": torch.bfloat16}
                    return torch.randn(size, generator=source, **how)

                keys, values = normal(heads, count), normal(heads, count)
                cache.update(keys, values, index)
                if packed:
                    layer = cache.layers[index]
                    some = min(count, _BALANCED_TOKENS)
                    queries = normal(config.num_attention_heads, some)
                    layer.settle_basis(keys[:, :, :some], queries, attention)
                    layer.append(keys, values, cache.ledger.last)

    @torch.inference_mode()
    def step_ms(self, step: Callable[..., torch.Tensor], rows: int, context: int) -> float:
        """Median of the steps, each with a wait for its tokens."""
        tokens = torch.ones(rows, dtype=torch.long, device=self.device)
        position = torch.full((rows,), context, device=self.device)
        ended, times = torch.zeros(rows, dtype=torch.bool), []
        for _ in range(WARM_UP + STEPS):
            start = perf_counter()
            logits = step(tokens, position, ended)
            tokens = logits.float().argmax(-1)
            tokens.tolist()
            position = position + 1
            times.append(perf_counter() - start)
        return 1e3 * median(times[WARM_UP:])

    def by_cache(self, cache: Cache) -> Callable[..., torch.Tensor]:
        """A step of transformers with one of its caches."""

        def step(tokens: torch.Tensor, position: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            positions = position.view(*[1] * len(self.axes), -1, 1).expand(*self.axes, -1, 1)
            inputs = {"input_ids": tokens[:, None], "position_ids": positions}
            return self.model(**inputs, past_key_values=cache, use_cache=True).logits[:, -1]

        return step


@torch.inference_mode()
def measure(model: Model, rows: int, context: int, bandwidth: float) -> Iterator[dict[str, Any]]:
    """A row for each cache and way to run it; what does not fit is told in "error"."""
    capture = record_cuda_graph if model.device.type == "cuda" else None
    ways: list[tuple[str, str | None, Any]] = [
        ("DynamicCache", None, None),
        ("bf16, eager", "bf16", None),
        ("bf16, graph", "bf16", capture),
        ("compact, eager", "compact", None),
        ("compact, graph", "compact", capture),
    ]
    for way, policy, record in ways:
        row: dict[str, Any] = {
            "model": model.name,
            "way": way,
            "batch": rows,
            "context": context,
            "weights": model.weights(rows),
        }
        try:
            cache = DynamicCache(config=model.config) if policy is None else OscarCache(policy)
            model.fill(cache, rows, context)
            if policy is None:
                step = model.by_cache(cache)
                row["kv_bytes"] = sum(2 * layer.keys.nbytes for layer in cache.layers)
            else:
                step = DecodeSteps(model.model, cache, model.axes, model.device, record)
                row["kv_bytes"] = cache.memory().kv_bytes
            row["ms"] = model.step_ms(step, rows, context)
            row["floor_ms"] = 1e3 * (row["weights"] + row["kv_bytes"]) / bandwidth
        except torch.cuda.OutOfMemoryError as error:
            row["error"] = str(error).splitlines()[0]
        cache = step = None
        gc.collect()
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
        yield row


def _table(rows: list[dict[str, Any]]) -> None:
    show(
        "A decode step",
        ("model", "batch", "context", "way", "KV GB", "ms", "floor ms", "of floor"),
        (
            (
                *(row["model"], str(row["batch"]), f"{row['context']:,}", row["way"]),
                *(
                    (row["error"][:30], "-", "-", "-")
                    if "error" in row
                    else (
                        f"{row['kv_bytes'] / 1e9:.3f}",
                        f"{row['ms']:.2f}",
                        f"{row['floor_ms']:.2f}",
                        f"{row['ms'] / row['floor_ms']:.2f}x",
                    )
                ),
            )
            for row in rows
        ),
    )
    for row in rows if torch.cuda.is_available() else ():
        if row["way"] == "compact, graph" and row["batch"] == 1 and "ms" in row:
            found = row["ms"] / row["floor_ms"]
            verdict = "met" if found <= AT_MOST else "NOT met"
            print(
                f"{row['model']}, {row['context']:,} tokens: {found:.2f} floors, "
                f"at most {AT_MOST}: {verdict}"
            )


def main(arguments: Sequence[str]) -> int:
    """Measure, print and record, model by model; 2 without a CUDA device."""
    options = parser("benchmarks.decode_step", __doc__)
    options.add_argument("--models", default=",".join(MODELS), help="of RELEASED, with commas")
    options.add_argument("--contexts", help="tokens, with commas")
    options.add_argument("--batches", default=",".join(map(str, BATCHES)), help="rows, likewise")
    options.add_argument("--tiny", action="store_true", help="a rehearsal with tiny models")
    options = options.parse_args(arguments)
    if not (options.tiny or torch.cuda.is_available()):
        print("benchmarks.decode_step needs a CUDA device; --tiny runs anywhere", file=sys.stderr)
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bandwidth = copy_bandwidth() if device.type == "cuda" else 1e10
    line = command("benchmarks.decode_step", arguments)
    extra = {"copy_bytes_per_second": bandwidth}
    record = Record("decode_step", line, device_name(device.type), [], NOTES, extra)
    contexts = TINY_CONTEXTS if options.tiny else CONTEXTS
    if options.contexts:
        contexts = tuple(map(int, options.contexts.split(",")))
    for name in options.models.split(","):
        model = Model(name, device, tiny=options.tiny)
        for rows in map(int, options.batches.split(",")):
            for context in contexts:
                for row in measure(model, rows, context, bandwidth):
                    record.rows.append(row)
                    record.write(options.out)
        model = None
        gc.collect()
        print(f"{name}: done", flush=True)
    _table(record.rows)
    finish(record, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
