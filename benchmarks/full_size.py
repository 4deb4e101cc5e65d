"""Whole conversations with full-size models and random weights, beside transformers' own cache.

python -m benchmarks.full_size [--models qwen3-vl-8b,... [--add]] [--tiny]
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

import torch

from benchmarks.conversation import TINY, Bench, Load
from benchmarks.random_model import RELEASED
from benchmarks.record import Record, Said, command, device_name, finish, now, parser, show

NOTES = [
    "Shapes, RoPE and layer counts of the released config.json, random weights in bfloat16, a "
    "small tokenizer. LLaVA's max_position_embeddings (4,096 and 32,768) are raised.",
    "Pictures of noise and (Omni) a recording of noise go through OscarVLPipeline and "
    "OscarOmniPipeline: processor, towers, prompt in one go, answer, a turn with a picture and "
    "1,000 tokens of text, a turn of 1,000 tokens of text, save, load, forget.",
    "ms, packed / DynamicCache: the same forward passes repeated with an OscarCache (attention "
    "oscar) and with a DynamicCache (attention sdpa), towers included, each cache's second time "
    "(at 128K its first). step: median of the decode steps, to the choice of the token, both "
    "eagerly. pipeline: a token of a long answer of the pipeline, of which it captures the steps; "
    "request s: from the call to the first token, the processor on the CPU included, first time.",
    "held: bytes that the allocator handed out more after the first answer than before the chat, "
    "as asked for (it rounds up). report: MemoryReport, which must agree within 1%.",
    "activations: most bytes held during the first answer, what is there of its inputs included, "
    "without weights and without what is held after it. Pixels wait on the CPU until they are "
    "read, in the replayed passes too.",
    "chunked: the same first prompt through a pipeline with prefill_chunk; prefill as of the "
    "replayed passes, once.",
    "kept: relative difference of logits between a later turn on the kept cache and the whole "
    "conversation read afresh, policy bf16; beside it the same of a DynamicCache, which is what "
    "rounding in bfloat16 does to these weights.",
]
CONTEXT, TINY_CONTEXT = 32768, 512
LONGER = {"qwen3-vl-8b": (131072,)}
"""Further contexts of some models."""
ROOM = 8192
"""Positions beyond the first prompt."""


def bounds(row: dict[str, Any]) -> list[dict[str, Any]]:
    """What a row is held against: found, the bound, and whether it is met."""
    oscar, dynamic, held = row["ms"]["oscar"], row["ms"]["dynamic"], row["held"]
    found = []

    def hold(figure: str, value: float, most: float) -> None:
        found.append({"figure": figure, "found": value, "at_most": most, "met": value <= most})

    if held:
        off = abs(row["memory"]["kv_bytes"] / held["requested"] - 1)
        hold("report against allocator", off, 0.01)
        hold("activations, GB", held["activations"] / 1e9, 12)
    if "chunked" in row and row["chunked"]["held"]:
        activations = row["chunked"]["held"]["activations"] / 1e9
        hold(f"activations in chunks of {row['chunked']['chunk']:,}, GB", activations, 2)
    hold("prefill / DynamicCache", oscar["prefill"] / dynamic["prefill"], 1.1)
    hold("turn of text / DynamicCache", oscar["turn_text"] / dynamic["turn_text"], 1.5)
    if "saved_ratio" in row:
        hold("saved / 16 bit", 1 / row["saved_ratio"], 1 / 6)
    if "kept" in row:
        # Both are rounding; they differ in the order of sums.
        hold("kept logits", row["kept"]["difference"], max(2 * row["kept"]["dynamic"], 0.02))
    return found


def measure(name: str, device: torch.device, *, tiny: bool) -> Iterator[dict[str, Any]]:
    """Rows of a model: one for each context, the first with what is measured once."""
    contexts = (CONTEXT, *LONGER.get(name, ()))
    if tiny:
        contexts = tuple(TINY_CONTEXT * context // CONTEXT for context in contexts)
    released = RELEASED[name].with_positions(max(contexts) + ROOM)
    bench = Bench(released.tiny() if tiny else released, TINY if tiny else Load(), device)
    bench.warm_up()
    for number, context in enumerate(contexts):
        row = {"model": name, "date": now()} | bench.conversation(context, whole=not number)
        if not number:
            row["kept"] = bench.kept()
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
    whole = [row for row in rows if "kept" in row]
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
            for row in whole
        ),
    )
    for row in whole:
        if row["experts"]:
            found = ", ".join(f"{name} {ms:.1f}" for name, ms in row["experts"].items())
            print(f"{row['model']}, ms of a decode step by experts x batch: {found}")
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
    """Measure, print and record, model by model. 2 without a CUDA device, 1 if a model failed."""
    options = parser("benchmarks.full_size", __doc__)
    options.add_argument("--models", default=",".join(RELEASED), help="some of them, with commas")
    options.add_argument("--add", action="store_true", help="keep the file's rows of other models")
    options.add_argument("--tiny", action="store_true", help="a rehearsal with tiny models")
    options = options.parse_args(arguments)
    names = options.models.split(",")
    if unknown := set(names) - RELEASED.keys():
        known = f"choose from {', '.join(RELEASED)}"
        print(f"no such model: {', '.join(sorted(unknown))}; {known}", file=sys.stderr)
        return 2
    if not (options.tiny or torch.cuda.is_available()):
        print("benchmarks.full_size needs a CUDA device; --tiny runs anywhere", file=sys.stderr)
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    line = command("benchmarks.full_size", arguments)
    said, failures, seconds = Said().messages, {}, {}
    extra = {"warnings": said, "failures": failures, "seconds": seconds}
    record = Record("full_size", line, device_name(device.type), [], NOTES, extra)
    if options.add and record.path(options.out).is_file():
        earlier = Record.load(record.path(options.out))
        record.rows += [row for row in earlier.rows if row["model"] not in names]
        seconds |= {name: s for name, s in earlier.extra["seconds"].items() if name not in names}
    for name in names:
        start = perf_counter()
        try:
            for row in measure(name, device, tiny=options.tiny):
                record.rows.append(row)
                record.write(options.out)
        except Exception as error:  # the other models are worth having
            traceback.print_exc()
            failures[name] = f"{type(error).__name__}: {error}"
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        seconds[name] = perf_counter() - start
        record.write(options.out)
        print(f"{name}: {seconds[name]:.0f} s", flush=True)
    _tables(record.rows)
    for what in (*said, *(f"FAILED {name}: {why}" for name, why in failures.items())):
        print(what)
    finish(record, options.out)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
