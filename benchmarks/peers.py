"""Compare our decode steps and batches with those of transformers and vLLM in a single run.

python -m benchmarks.peers [--models qwen3-vl-8b,qwen3-vl-30b-a3b] [--weights bf16,fp8,int4]
    [--contexts 2048,32768,131072] [--limit 600]

The parts of other benchmarks run one after another in their own processes: steps of ``decode_step``
and largest batches of ``throughput`` for our caches and those of transformers, ``client_loop`` for
many clients with short prompts, and ``vllm_attention`` if vLLM is installed. What matters most
comes first. Each process imports while the one before it measures, unless the host limits the speed
of what is measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from itertools import product
from time import perf_counter
from typing import Any, NamedTuple

import torch

from benchmarks import client_loop, decode_step, throughput, vllm_attention
from benchmarks.cache_variants import VARIANTS, Decoder
from benchmarks.decode_step import COMPILED, COMPILED_CELL
from benchmarks.random_model import RANDOM_MODELS
from benchmarks.record import Record, Row, command, device_name, finish, parser, show
from benchmarks.vllm_process import CHILD, Child, vllm_versions, wait_to_begin, write_rows

MODELS, CONTEXTS, FULL = "qwen3-vl-8b,qwen3-vl-30b-a3b", "2048,32768,131072", "32768"
CLIENTS = {"prompt": 2000, "new_tokens": 400, "clients": 64}
"""Load of ``client_loop``; more loads are measured by calling it directly."""
SMALL_CLIENTS = {"prompt": 40, "new_tokens": 4, "clients": 2}
PART_SECONDS = 590.0
"""Default time limit of each process, in seconds."""
WAYS = ("dynamic", "bf16-graph", "standard-graph", "compact-graph")
"""Caches to measure with a single sequence; ``FULL_WAYS`` are the caches for full memory."""
FULL_WAYS = ("dynamic", "standard-graph", "compact-graph")
_LOOPS = "decode_step, throughput"
"""Name of the part of our caches and those of transformers, where its error is reported."""
ATTENTIONS = {
    "auto": "vLLM, bf16",
    "fp8": "vLLM, fp8",
    "standard": "vLLM, our standard pages",
    "int4_per_token_head": "vLLM, int4 per token and head",
    "turboquant_k3v4_nc": "vLLM, TurboQuant k3v4_nc",
    "turboquant_3bit_nc": "vLLM, TurboQuant 3bit_nc",
}
"""Titles of the attentions of ``vllm_attention``, in the order of their parts. The row of an
attention that the installed vLLM lacks is an error."""
OURS = ("standard, graph", "compact, graph", ATTENTIONS["standard"])
"""Our variants, each of which is compared with the best of the other methods."""
NOTES = [
    "ms: of a step of one sequence, from its token on the host to the next one there. At full "
    "memory: as many sequences as the GPU has room for, and their tokens per second together.",
    "Random weights of the released shapes, caches of random values. transformers' caches run "
    "eagerly, StaticCache compiled as in `generate`, at one context, as it compiles for a minute; "
    "ours and vLLM's steps are CUDA graphs, vLLM's without torch.compile.",
    "Weights are in bf16 unless a model's name ends in fp8 or int4; then vLLM's are too: FP8 that "
    "it makes while loading, or INT4 of compressed-tensors with a scale for each 128 weights.",
    "TurboQuant of vLLM stores the first and last two layers in 16 bits.",
]


def of_loops(rows: Iterable[Row]) -> Iterator[Row]:
    """Convert rows of ``decode_step``, and the largest batches of ``throughput``."""
    for row in rows:
        common = {"model": row["model"], "method": row["way"]}
        if "error" in row:
            if not row.get("out_of_memory"):
                yield common | {"error": row["error"]}
        elif "row_bytes" in row:  # From ``throughput``.
            yield common | {
                "full": row["context"],
                "sequences": row["batch"],
                "tokens_per_s": row["tokens_per_s"],
            }
        else:
            yield common | {"context": row["context"], "ms": row["ms"]}


def of_vllm(rows: Iterable[Row]) -> Iterator[Row]:
    """Convert those rows of ``vllm_attention`` that can be compared with the other benchmarks."""
    for row in rows:
        common = {"model": row["model"], "method": ATTENTIONS.get(row.get("attention", ""), "vLLM")}
        what, _, tokens = str(row.get("what", "")).rpartition(" ")
        if "error" in row:
            yield common | {"error": row["error"]}
        elif what == "one sequence":
            yield common | {"context": int(tokens), "ms": row["ms"]}
        elif what == "full memory":
            figures = {name: row[name] for name in ("sequences", "tokens_per_s")}
            yield common | {"full": int(tokens)} | figures


def named(models: str, weights: str) -> str:
    """Return the names of all models with all formats of weights, comma-separated.

    Args:
        models, weights: comma-separated names; "bf16" adds no suffix to a model's name.
    """
    pairs = product(models.split(","), weights.split(","))
    return ",".join(name if form == "bf16" else f"{name}-{form}" for name, form in pairs)


class Part(NamedTuple):
    """Part of a run: a process of another benchmark.

    Attributes:
        name: name of the benchmark.
        spec: argument of the process, see ``Child``.
        rows: function that converts its rows and its error, if any.
        alone: whether no other part may import meanwhile, because the host limits the speed of this
            one.
    """

    name: str
    spec: dict[str, Any]
    rows: Callable[[list[Row], str | None], Iterator[Row]]
    alone: bool = False


def of_decoder(spec: dict[str, Any], rows: list[Row], error: str | None) -> Iterator[Row]:
    """Convert rows of ``child`` and its error, if any."""
    yield from of_loops(rows)
    if error is not None:
        yield {"model": spec["model"], "method": _LOOPS, "error": error}


def of_clients(spec: dict[str, Any], rows: list[Row], error: str | None) -> Iterator[Row]:
    """Convert rows of ``client_loop``."""
    for row in client_loop.with_error(spec, rows, error):
        yield row | {"method": row["engine"]}


def of_attention(spec: dict[str, Any], rows: list[Row], error: str | None) -> Iterator[Row]:
    """Convert rows of ``vllm_attention``."""
    return of_vllm(vllm_attention.with_error(spec, rows, error))


def child(spec: dict[str, Any]) -> None:
    """Measure steps and largest batches of our caches and those of transformers, by one decoder."""
    wait_to_begin(spec)
    decoder = Decoder(spec["model"], torch.device(spec["device"]), tiny=spec["tiny"])

    def rows() -> Iterator[Row]:
        # Floors, which need the bandwidth, are not compared.
        yield from decode_step.rows_of(decoder, 1.0, spec["contexts"], (1,), spec["ways"])
        full_ways = [way for way in spec["ways"] if way in FULL_WAYS]
        yield from throughput.rows_of(decoder, 1.0, spec["full"], full_ways)

    write_rows(spec["rows"], map(printed, rows()))


def printed(row: Row) -> Row:
    """Print a row and return it."""
    print(json.dumps(row), flush=True)
    return row


def our_part(place: Row, model: str, ways: Sequence[str], **tokens: Sequence[int]) -> Part:
    """Return a part of our caches and those of transformers.

    If the weights are quantized, transformers' caches are left out, as its steps would run our
    layers.

    Args:
        place: device, and whether the model is tiny.
        model: name of the model.
        ways: caches to measure.
        tokens: lengths of the "contexts" of a single sequence, and of those at "full" memory.
    """
    ours = [way for way in ways if not (way == "dynamic" and RANDOM_MODELS[model].weights)]
    spec = {"model": model, "ways": ours, **tokens, **place}
    return Part("peers", spec, partial(of_decoder, spec), alone="dynamic" in ours)


def parts_of(options: argparse.Namespace, models: Sequence[str]) -> Iterator[Part]:
    """Yield the parts of a run, model by model, and last the compiled cache of transformers."""
    has_vllm = not options.tiny and find_spec("vllm") is not None
    load = SMALL_CLIENTS if options.tiny else CLIENTS
    place = {"device": "cuda" if torch.cuda.is_available() else "cpu", "tiny": options.tiny}
    tokens = {
        name: [int(x) for x in getattr(options, name).split(",")] for name in ("contexts", "full")
    }
    for model in models:
        yield our_part(place, model, WAYS, **tokens)
        loops = [asdict(client_loop.Loop(model, seconds=options.seconds, **load))]
        clients = [
            {"engine": engine, "loops": loops, **place}
            for engine in (client_loop.OURS, client_loop.VLLM)[: 1 + has_vllm]
            if options.seconds
        ]
        attentions = [
            {"model": model, "attention": name, "prompts": False, **tokens}
            for name in options.attentions.split(",")
            if has_vllm
        ]
        vllm_parts = [
            Part("vllm_attention", spec, partial(of_attention, spec)) for spec in attentions
        ]
        yield from vllm_parts[:1]
        yield from (Part("client_loop", spec, partial(of_clients, spec)) for spec in clients)
        yield from vllm_parts[1:]
    model, context = COMPILED_CELL
    if model in models and context in tokens["contexts"] and not options.tiny:
        yield our_part(place, model, [COMPILED], contexts=[context], full=[])


class Clock:
    """Time that a run has left.

    Args:
        seconds: maximum time of the run, in seconds; None for no limit.
        part: maximum time of a part, in seconds.
    """

    def __init__(self, seconds: float | None, part: float) -> None:
        self._end = float("inf") if seconds is None else self._now() + seconds
        self._part = part

    def _now(self) -> float:
        return perf_counter()

    @property
    def left(self) -> float:
        """Maximum time of a part that begins now, in seconds."""
        return min(self._part, self._end - self._now())


class Parts:
    """Parts that run one after the other; while one runs, the next one imports.

    Args:
        parts: the parts; the first one begins to import at once, and the one after a part that
            runs ``alone`` only when that has ended.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        self._waiting = [*parts]
        self._following = self._started()

    def _started(self) -> tuple[Part, Child] | None:
        if not self._waiting:
            return None
        part = self._waiting.pop(0)
        return part, Child(f"benchmarks.{part.name}", part.spec)

    def rows(self, clock: Clock) -> Iterator[Row]:
        """Run the parts and yield their rows."""
        while self._following is not None:
            part, child = self._following
            self._following = None if part.alone else self._started()
            if clock.left > 0:
                start = perf_counter()
                yield from part.rows(*child.finish(clock.left))
                what = part.spec.get("engine") or part.spec.get("attention") or _LOOPS
                print(f"{what}: {perf_counter() - start:.1f} s", flush=True)
            else:
                child.stop()
                yield from part.rows([], "the run's --limit left no time")
            if part.alone:
                self._following = self._started()

    def close(self) -> None:
        """End the part that has not begun, if any."""
        if self._following is not None:
            self._following[1].stop()


def all_rows(options: argparse.Namespace, models: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of our caches and of all installed peers, part by part.

    Args:
        options: parsed command line.
        models: names of the models.
    """
    clock = Clock(options.limit, options.part_limit)
    with closing(Parts(parts_of(options, models))) as parts:
        yield from parts.rows(clock)


def best(rows: Iterable[Row]) -> Iterator[tuple[str, str, float]]:
    """Compare each of our figures with the best figure of the other methods.

    Yields:
        A description of our figure, the name of the best other method, and our speedup over it.
    """
    speeds: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if "error" in row or "clients" in row:
            continue
        speed = row["tokens_per_s"] if "full" in row else 1e3 / row["ms"]
        tokens = row["full"] if "full" in row else row["context"]
        place = f"{tokens:,} tokens, {'full memory' if 'full' in row else 'one sequence'}"
        speeds.setdefault((row["model"], place), {})[row["method"]] = speed
    for (model, place), found in speeds.items():
        others = {name: speed for name, speed in found.items() if name not in OURS}
        others.pop(VARIANTS["bf16-graph"].title, None)
        if not others:
            continue
        peer = max(others, key=others.__getitem__)
        for name in OURS:
            if name in found:
                yield f"{model}, {place}: {name}", peer, found[name] / others[peer]


def report(rows: Sequence[Row]) -> None:
    """Print a table, and our speedups over the best of the other methods."""
    contexts = sorted({row["context"] for row in rows if "context" in row})
    full = sorted({row["full"] for row in rows if "full" in row})
    cells: dict[tuple[str, str], dict[str, str]] = {}
    loops = [row for row in rows if "clients" in row]
    for row in rows:
        if "clients" in row:
            continue
        line = cells.setdefault((row["model"], row["method"]), {})
        if "error" in row:
            line["error"] = row["error"][:40]
        elif "full" in row:
            line[f"full {row['full']}"] = f"{row['sequences']}: {row['tokens_per_s']:.0f}"
        else:
            line[f"ms {row['context']}"] = f"{row['ms']:.2f}"
    names = [*(f"ms {x}" for x in contexts), *(f"full {x}" for x in full), "error"]
    titles = [*(f"ms, {x:,}" for x in contexts), *(f"full, {x:,}" for x in full), ""]
    lines = ((*who, *(line.get(name, "") for name in names)) for who, line in cells.items())
    show("Steps, and sequences and tokens/s at full memory", ("model", "method", *titles), lines)
    for place, peer, times in best(rows):
        print(f"{place} is {times:.2f} times as fast as {peer}")
    if loops:
        client_loop.report(loops)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit code, 1 if anything failed."""
    if list(arguments[:1]) == [CHILD]:
        child(json.loads(arguments[1]))
        return 0
    options_parser = parser("benchmarks.peers", __doc__)
    add = options_parser.add_argument
    add("--models", default=MODELS, help=f"models, comma-separated: {', '.join(RANDOM_MODELS)}")
    add(
        "--weights", default="bf16", help="formats of the weights, comma-separated: bf16, fp8, int4"
    )
    add("--contexts", default=CONTEXTS, help="tokens of a single sequence, comma-separated")
    add("--full", default=FULL, help="contexts at full memory, comma-separated")
    add(
        "--attentions",
        default=",".join(ATTENTIONS),
        help="attentions of vLLM, comma-separated: %(default)s",
    )
    add(
        "--seconds",
        type=float,
        default=20.0,
        help="seconds of the clients' load; 0 leaves the clients out",
    )
    add("--limit", type=float, help="time of the whole run, in seconds; what is left is cut off")
    add("--part-limit", type=float, default=PART_SECONDS, help="time of each part, in seconds")
    add("--tiny", action="store_true", help="trial run with tiny models, without vLLM")
    options = options_parser.parse_args(arguments)
    models = named(options.models, options.weights)
    if unknown := set(models.split(",")) - RANDOM_MODELS.keys():
        known = ", ".join(RANDOM_MODELS)
        options_parser.error(f"--models, --weights: there is no {min(unknown)}; there are {known}")
    if unknown := set(options.attentions.split(",")) - ATTENTIONS.keys():
        known = ", ".join(ATTENTIONS)
        options_parser.error(f"--attentions: there is no {min(unknown)}; there are {known}")
    if not options.seconds >= 0:
        options_parser.error(f"--seconds {options.seconds:g}: must be at least 0")
    for name, seconds in (("limit", options.limit), ("part-limit", options.part_limit)):
        if seconds is not None and not seconds > 0:
            options_parser.error(f"--{name} {seconds:g}: must be more than 0 seconds")
    for name in ("contexts", "full"):
        text = getattr(options, name)
        if not all(part.isdecimal() and int(part) for part in text.split(",")):
            options_parser.error(f"--{name} {text}: must be numbers of tokens, comma-separated")
    device = device_name("cuda" if torch.cuda.is_available() else "cpu")
    line, rows = command("benchmarks.peers", arguments), list[Row]()
    extra: dict[str, Any] = {"complete": False, "seconds": 0.0}
    has_vllm = not options.tiny and find_spec("vllm") is not None
    record, start = Record("peers", line, device, rows, NOTES, extra=extra), perf_counter()
    if has_vllm:
        record.versions = vllm_versions()
    for row in all_rows(options, models.split(",")):
        rows.append(row)
        extra["seconds"] = round(perf_counter() - start, 1)
        record.write(options.out)  # Keep the results even if the run is interrupted.
    extra["complete"] = True
    report(rows)
    finish(record, options.out)
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
