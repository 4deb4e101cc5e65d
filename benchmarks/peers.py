"""Compare our decode steps and batches with those of transformers and vLLM in a single run.

python -m benchmarks.peers [--models qwen3-vl-8b,qwen3-vl-30b-a3b] [--weights bf16,fp8,int4]
    [--contexts 2048,32768,131072]

Other benchmarks run one after another in their own processes: ``decode_step`` and ``throughput``
for our caches and those of transformers, ``client_loop`` for many clients with short prompts, and
``vllm_attention`` if vLLM is installed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import torch

from benchmarks import client_loop
from benchmarks.cache_variants import VARIANTS
from benchmarks.decode_step import COMPILED, COMPILED_CELL
from benchmarks.random_model import RANDOM_MODELS
from benchmarks.record import Record, Row, command, device_name, finish, parser, show

MODELS, CONTEXTS, FULL = "qwen3-vl-8b,qwen3-vl-30b-a3b", "2048,32768,131072", "32768"
CLIENTS = ("--prompts", "2000", "--clients", "64")
"""Arguments of ``client_loop``; more loads are measured by calling it directly."""
SMALL_CLIENTS = ("--prompts", "40", "--clients", "2", "--new-tokens", "4", "--seconds", "1")
WAYS = ("dynamic", "bf16-graph", "standard-graph", "compact-graph")
"""Caches to measure with a single sequence; ``FULL_WAYS`` are the caches for full memory."""
FULL_WAYS = ("dynamic", "standard-graph", "compact-graph")
ATTENTIONS = {
    "auto": "vLLM, bf16",
    "fp8": "vLLM, fp8",
    "int4_per_token_head": "vLLM, int4 per token and head",
    "turboquant_k3v4_nc": "vLLM, TurboQuant k3v4_nc",
    "turboquant_3bit_nc": "vLLM, TurboQuant 3bit_nc",
    "standard": "vLLM, our standard pages",
}
"""Titles of the attentions of ``vllm_attention``. The row of an attention that the installed vLLM
lacks is an error."""
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


def measured(name: str, arguments: Sequence[str]) -> list[Row]:
    """Run another benchmark in its own process and return its rows, or a row with its error."""
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, "-m", f"benchmarks.{name}", *arguments, "--out", folder]
        code = subprocess.run(line, check=False).returncode
        files = list(Path(folder).glob(f"{name}-*.json"))
        if files:
            return Record.load(files[0]).rows
    return [{"model": "", "way": name, "error": f"exit code {code}"}]


def of_loops(rows: Iterable[Row], *, full: bool) -> Iterator[Row]:
    """Convert rows of ``decode_step`` or, at full memory, the largest batches of ``throughput``."""
    for row in rows:
        common = {"model": row["model"], "method": row["way"]}
        if "error" in row:
            if not row.get("out_of_memory"):
                yield common | {"error": row["error"]}
        elif full:
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


def all_rows(models: str, contexts: str, full: str, *, tiny: bool) -> Iterator[Row]:
    """Yield the rows of our caches and of all installed peers."""
    small = ["--tiny"] if tiny else []
    steps = ["--models", models, "--contexts", contexts, "--ways", ",".join(WAYS), *small]
    yield from of_loops(measured("decode_step", steps), full=False)
    model, context = COMPILED_CELL
    if not tiny and model in models.split(",") and str(context) in contexts.split(","):
        cell = ["--models", model, "--contexts", str(context), "--ways", COMPILED]
        yield from of_loops(measured("decode_step", cell), full=False)
    batches = ["--models", models, "--contexts", full, "--ways", ",".join(FULL_WAYS), *small]
    yield from of_loops(measured("throughput", batches), full=True)
    clients = SMALL_CLIENTS if tiny else CLIENTS
    for row in measured("client_loop", ["--models", models, *clients, *small]):
        yield row | {"method": row.get("engine", row.get("way", ""))}
    if tiny or find_spec("vllm") is None:
        return
    for model, attention in product(models.split(","), ATTENTIONS):
        line = ["--model", model, "--contexts", contexts, "--full", full, "--attention", attention]
        yield from of_vllm(measured("vllm_attention", line))


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
    options_parser = parser("benchmarks.peers", __doc__)
    add = options_parser.add_argument
    add("--models", default=MODELS, help=f"models, comma-separated: {', '.join(RANDOM_MODELS)}")
    add(
        "--weights", default="bf16", help="formats of the weights, comma-separated: bf16, fp8, int4"
    )
    add("--contexts", default=CONTEXTS, help="tokens of a single sequence, comma-separated")
    add("--full", default=FULL, help="contexts at full memory, comma-separated")
    add("--tiny", action="store_true", help="trial run with tiny models, without vLLM")
    options = options_parser.parse_args(arguments)
    models = named(options.models, options.weights)
    if unknown := set(models.split(",")) - RANDOM_MODELS.keys():
        known = ", ".join(RANDOM_MODELS)
        options_parser.error(f"--models, --weights: there is no {min(unknown)}; there are {known}")
    device = device_name("cuda" if torch.cuda.is_available() else "cpu")
    line, rows = command("benchmarks.peers", arguments), list[Row]()
    record = Record("peers", line, device, rows, NOTES, extra={"complete": False})
    for row in all_rows(models, options.contexts, options.full, tiny=options.tiny):
        rows.append(row)
        record.write(options.out)  # Keep the results even if the run is interrupted.
    record.extra["complete"] = True
    report(rows)
    finish(record, options.out)
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
