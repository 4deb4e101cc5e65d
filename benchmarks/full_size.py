"""Compare our cache with transformers' own in conversations with full-size random models.

python -m benchmarks.full_size [--models qwen3-vl-8b,... [--add]] [--tiny]
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

import torch

from benchmarks.conversation import TINY, Bench, Sizes
from benchmarks.profiling import release
from benchmarks.random_model import RELEASED
from benchmarks.record import (
    Record,
    WarningLog,
    command,
    device_name,
    device_of,
    finish,
    models_of,
    now,
    parser,
    show,
)

NOTES = [
    "Shapes, RoPE and layer counts of the released config.json, random weights in bfloat16, a "
    "small tokenizer. LLaVA's max_position_embeddings (4,096 and 32,768) are raised.",
    "Pictures of noise and (Omni) a recording of noise go through OscarVLPipeline and "
    "OscarOmniPipeline: processor, towers, the prompt at once, an answer, a turn with a picture "
    "and 1,000 tokens of text, a turn of 1,000 tokens of text, save, load, forget.",
    "ms, packed / DynamicCache: the same forward passes repeated with an OscarCache (attention "
    "oscar) and with a DynamicCache (attention sdpa), with towers; the second repetition counts "
    "(at 128K the first). step: median of the eager decode steps, to the choice of the token. "
    "pipeline: a token of a long answer of the pipeline, which captures the steps. request s: from "
    "the first call to its first token, with the processor on the CPU.",
    "held: requested bytes that the allocator has handed out more after the first answer than "
    "before the chat. report: MemoryReport, which must agree within 1%.",
    "activations: most bytes during the first answer on top of weights and of what is held after "
    "it; inputs on the GPU count. Pixels wait on the CPU until they are read, in the replayed "
    "passes too.",
    "chunked: the same first prompt through a pipeline with prefill_chunk; its prefill is replayed "
    "once.",
    "kept: relative difference of logits between a later turn on the kept cache and a fresh read "
    "of the conversation, policy bf16; beside it that difference of a DynamicCache, the effect of "
    "rounding in bfloat16 on these weights.",
]
CONTEXT, TINY_CONTEXT = 32768, 512
LONGER = {"qwen3-vl-8b": (131072,)}
"""Additional context lengths for some models."""
ROOM = 8192
"""Number of positions available after the first prompt."""


def bounds(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the bounds of a row, each with its value and whether it is met."""
    oscar, dynamic, memory = row["ms"]["oscar"], row["ms"]["dynamic"], row["held"]
    checks = []

    def check(figure: str, value: float, most: float) -> None:
        checks.append({"figure": figure, "found": value, "at_most": most, "met": value <= most})

    if memory:
        off = abs(row["memory"]["kv_bytes"] / memory["requested"] - 1)
        check("report against allocator", off, 0.01)
        check("activations, GB", memory["activations"] / 1e9, 12)
    if "chunked" in row and row["chunked"]["held"]:
        activations = row["chunked"]["held"]["activations"] / 1e9
        check(f"activations in chunks of {row['chunked']['chunk']:,}, GB", activations, 2)
    check("prefill / DynamicCache", oscar["prefill"] / dynamic["prefill"], 1.1)
    check("turn of text / DynamicCache", oscar["turn_text"] / dynamic["turn_text"], 1.5)
    if "saved_ratio" in row:
        check("saved / 16 bit", 1 / row["saved_ratio"], 1 / 6)
    if "kept" in row:
        # Both differences are rounding errors due to another order of summation.
        check("kept logits", row["kept"]["difference"], max(2 * row["kept"]["dynamic"], 0.02))
    return checks


def measure(name: str, device: torch.device, *, tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for each context of a model; the first row has the one-time measurements."""
    contexts = (CONTEXT, *LONGER.get(name, ()))
    if tiny:
        contexts = tuple(TINY_CONTEXT * context // CONTEXT for context in contexts)
    released = RELEASED[name].with_positions(max(contexts) + ROOM)
    bench = Bench(released.tiny() if tiny else released, TINY if tiny else Sizes(), device)
    bench.warm_up()
    for number, context in enumerate(contexts):
        row = {"model": name, "date": now()} | bench.conversation(context, full=not number)
        if not number:
            row["kept"] = bench.kept_cache_error()
        yield row | {"bounds": bounds(row)}


def _tables(rows: list[dict[str, Any]]) -> None:
    times = ("prefill", "step", "turn_picture", "turn_text")
    show(
        "Milliseconds, packed / DynamicCache",
        ("model", "tokens", "pictures", *times, "pipeline", "request s"),
        (
            (
                *(row["model"], f"{row['prompt_tokens']:,}", str(row["images"])),
                *(f"{row['ms']['oscar'][t]:.1f} / {row['ms']['dynamic'][t]:.1f}" for t in times),
                *(f"{row['pipeline_step_ms']:.1f}", f"{row['request_s']:.2f}"),
            )
            for row in rows
        ),
    )
    sizes = ("weights", "16 bit", "report", "held", "activations")
    show(
        "Memory, GB",
        ("model", "tokens", *sizes, "ratio", "kernels"),
        (
            (
                *(row["model"], f"{row['prompt_tokens']:,}"),
                *(_gigabytes(row["weights"]), _gigabytes(row["memory"]["bf16_bytes"])),
                *(_gigabytes(row["memory"]["kv_bytes"]), _gigabytes(row["held"].get("requested"))),
                _gigabytes(row["held"].get("activations")),
                f"{row['memory']['ratio']:.2f}x",
                "all" if all(row["kernels"].values()) else "NOT all",
            )
            for row in rows
        ),
    )
    first_rows = [row for row in rows if "kept" in row]
    show(
        "Conversations",
        ("model", "saved GB", "ratio", "save s", "load s", "same", "forget ms", "kept", "dynamic"),
        (
            (
                *(row["model"], _gigabytes(row["saved_bytes"]), f"{row['saved_ratio']:.2f}x"),
                *(f"{row['save_s']:.2f}", f"{row['load_s']:.2f}"),
                "yes" if row["same_after_load"] else "NO",
                f"{row['forget_ms']:.1f}",
                *(f"{row['kept'][kind]:.1e}" for kind in ("difference", "dynamic")),
            )
            for row in first_rows
        ),
    )
    for row in first_rows:
        if row["experts"]:
            times = ", ".join(f"{name} {ms:.1f}" for name, ms in row["experts"].items())
            print(f"{row['model']}, ms of a decode step by experts x batch: {times}")
    for row in rows:
        if "chunked" in row:
            chunked, at_once = row["chunked"], row["ms"]["oscar"]["prefill"]
            print(
                f"{row['model']}, {row['prompt_tokens']:,} tokens in chunks of "
                f"{chunked['chunk']:,}: {chunked['prefill_ms']:.0f} ms, at once {at_once:.0f}; "
                f"activations {_gigabytes(chunked['held'].get('activations'))} GB"
            )
    for row in rows:
        for bound in row["bounds"]:
            verdict = "met" if bound["met"] else "NOT met"
            print(
                f"{row['model']}, {row['prompt_tokens']:,} tokens: {bound['figure']} "
                f"{bound['found']:.3g}, at most {bound['at_most']:.3g}: {verdict}"
            )


def _gigabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e9:.3f}"


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark model by model.

    Returns:
        The exit code: 2 without a CUDA device, 1 if a model failed, else 0.
    """
    options = parser("benchmarks.full_size", __doc__)
    options.add_argument("--models", default=",".join(RELEASED), help="models, comma-separated")
    options.add_argument("--add", action="store_true", help="keep the file's rows of other models")
    options.add_argument("--tiny", action="store_true", help="trial run with tiny models")
    options = options.parse_args(arguments)
    names = models_of(options.models, RELEASED)
    device = None if names is None else device_of("full_size", tiny=options.tiny)
    if names is None or device is None:
        return 2
    line = command("benchmarks.full_size", arguments)
    warnings, failures, seconds = WarningLog().messages, {}, {}
    extra = {"warnings": warnings, "failures": failures, "seconds": seconds}
    record = Record("full_size", line, device_name(device.type), [], NOTES, extra)
    if options.add and (earlier := record.earlier(options.out)):
        record.rows += [row for row in earlier.rows if row["model"] not in names]
        seconds |= {name: s for name, s in earlier.extra["seconds"].items() if name not in names}
    for name in names:
        start = perf_counter()
        try:
            for row in measure(name, device, tiny=options.tiny):
                record.rows.append(row)
                record.write(options.out)
        except Exception as error:  # Continue with the other models.
            traceback.print_exc()
            failures[name] = f"{type(error).__name__}: {error}"
        release(device)
        seconds[name] = perf_counter() - start
        record.write(options.out)
        print(f"{name}: {seconds[name]:.0f} s", flush=True)
    _tables(record.rows)
    for message in (*warnings, *(f"FAILED {name}: {why}" for name, why in failures.items())):
        print(message)
    finish(record, options.out)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
