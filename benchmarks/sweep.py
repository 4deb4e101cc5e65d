"""A benchmark of several full-size models: its command line, its record, and models that fail."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

import torch

from benchmarks.cell import release
from benchmarks.decoder import Decoder
from benchmarks.record import Record, command, device_name, finish, parser
from benchmarks.released import RELEASED
from benchmarks.said import Said
from benchmarks.timing import copy_bandwidth
from benchmarks.ways import WAYS

MODELS = ("qwen3-vl-8b", "llava-1.6-vicuna-7b", "qwen3-vl-30b-a3b", "qwen3-omni-30b-a3b")
_PRETENDED_BANDWIDTH = 1e10
"""Of a rehearsal."""

Rows = list[dict[str, Any]]


def options_of(
    benchmark: str, description: str | None, contexts: Sequence[int]
) -> argparse.ArgumentParser:
    """The options that such benchmarks have in common."""
    options = parser(f"benchmarks.{benchmark}", description)
    options.add_argument("--models", type=_names(RELEASED), default=MODELS, help="with commas")
    options.add_argument(
        "--contexts", type=numbers, default=tuple(contexts), help="tokens, with commas"
    )
    options.add_argument(
        "--add", action="store_true", help="keep the file's rows that are not measured again"
    )
    options.add_argument("--tiny", action="store_true", help="a rehearsal with tiny models")
    return options


def add_ways(options: argparse.ArgumentParser, default: Sequence[str] | None) -> None:
    """Let the ways be chosen."""
    options.add_argument(
        "--ways", type=_names(WAYS), default=default, help=f"of {', '.join(WAYS)}, with commas"
    )


def sweep(
    benchmark: str,
    arguments: Sequence[str],
    chosen: argparse.Namespace,
    notes: list[str],
    measure: Callable[[Decoder, float], Iterator[dict[str, Any]]],
    report: Callable[[Rows], None],
    cell: Sequence[str],
) -> int:
    """Measure model by model; each row is printed and in the file as soon as it is there.

    Args:
        benchmark: module below ``benchmarks``.
        arguments: of the command line; ``chosen`` is what ``options_of`` made of them.
        notes: of the record.
        measure: rows of a decoder, given the bandwidth of a copy in bytes per second.
        report: prints tables and verdicts.
        cell: fields that are alike in rows of which a later run replaces an earlier one's.

    Returns:
        0; 1 if a model or a cell failed (for want of memory is no failure); 2 without a GPU.
    """
    on_gpu = torch.cuda.is_available()
    if not (chosen.tiny or on_gpu):
        print(f"benchmarks.{benchmark} needs a CUDA device; --tiny runs anywhere", file=sys.stderr)
        return 2
    device = torch.device("cuda" if on_gpu else "cpu")
    bandwidth = copy_bandwidth() if on_gpu else _PRETENDED_BANDWIDTH
    said, failures, seconds = Said(), {}, {}
    line = command(f"benchmarks.{benchmark}", arguments)
    extra = {"warnings": said.messages, "failures": failures, "seconds": seconds}
    record = Record(benchmark, line, device_name(device.type), [], notes, extra)
    earlier, new = [], []
    if chosen.add and record.path(chosen.out).is_file():
        earlier = Record.load(record.path(chosen.out)).rows
    release(device)  # the copy's gigabytes
    for name in chosen.models:
        start = perf_counter()
        try:
            for row in measure(Decoder(name, device, tiny=chosen.tiny), bandwidth):
                new.append(row | {"command": line})
                earlier = [one for one in earlier if any(one[x] != row[x] for x in cell)]
                record.rows = earlier + new
                record.write(chosen.out)
                print(_line(row), flush=True)
        except Exception as error:  # the other models are worth having
            traceback.print_exc()
            failures[name] = f"{type(error).__name__}: {error}"
        release(device)
        seconds[name] = perf_counter() - start
        record.write(chosen.out)
        print(f"{name}: {seconds[name]:.0f} s", flush=True)
    said.close()
    report(sorted(record.rows, key=lambda row: (row["model"], row["context"], row["batch"])))
    for what in (*said.messages, *(f"FAILED {name}: {why}" for name, why in failures.items())):
        print(what)
    finish(record, chosen.out)
    broken = any(row.get("out_of_memory") is False for row in new)
    return int(broken or bool(failures))


def _line(row: dict[str, Any]) -> str:
    what = f"{row['model']}, {row['way']}, {row['batch']} x {row['context']:,}: "
    if "error" in row:
        return what + row["error"]
    return what + f"{row['ms']:.2f} ms, {row['tokens_per_s']:.1f} tokens/s"


def _names(known: Sequence[str] | dict[str, Any]) -> Callable[[str], tuple[str, ...]]:
    def names(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        if unknown := sorted(set(found) - set(known)):
            raise argparse.ArgumentTypeError(
                f"no such name: {', '.join(unknown)}; choose from {', '.join(known)}"
            )
        return found

    return names


def numbers(text: str) -> tuple[int, ...]:
    try:
        found = tuple(map(int, text.split(",")))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give whole numbers from 1, with commas")
    return found
