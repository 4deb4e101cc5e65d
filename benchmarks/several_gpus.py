"""Compare one model on several GPUs with the same model on one GPU: tokens, times and memory.

python -m benchmarks.several_gpus [--model qwen3-vl-8b] [--context 32768] [--gpus 2] [--tiny]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.distributed.launcher import LaunchConfig, elastic_launch

from benchmarks.profiling import release
from benchmarks.random_model import NEVER, RELEASED, Released, build
from benchmarks.record import Record, command, device_name, finish, parser, show
from oscar_mm.kernels.address_range import bytes_in_ranges
from oscar_mm.pipelines import pipeline_for
from oscar_mm.pipelines.loading import device_of

NOTES = [
    "Random weights of the released shapes in bfloat16, written to a checkpoint and loaded from it "
    "in each way. one: on one GPU. layers: device_map='auto', whole layers on each GPU. heads: "
    "tp_plan='auto', a part of each layer on each GPU, by processes of torchrun.",
    "Pictures of noise and a question, policy compact; the second of two such requests is timed. "
    "ms: time of a token of the answer after the first. "
    "GB: most bytes that the allocator had handed out, and the KV cache as reported, GPU by GPU.",
    "same: tokens of the answer before the first that differs from one GPU's. heads rounds sums of "
    "parts, one GPU rounds the full sums, and random weights prefer no token by much.",
]
TOKEN_SIDE = 32
"""Width and height of the part of a picture that one token covers, in pixels."""


def measure_placement(
    folder: Path, placement: dict[str, Any], pictures: tuple[int, int], answer: int
) -> dict[str, Any]:
    """Measure a checkpoint in this process, and return the figures.

    Args:
        folder: folder of the checkpoint.
        placement: pipeline argument that selects the devices of the model.
        pictures: number of pictures, and number of tokens of each picture.
        answer: number of tokens of the answer.
    """
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if devices:
        torch.cuda.init()  # The reset requires this if the process has not used a GPU yet.
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)
    start = perf_counter()
    pipe = pipeline_for(folder)(folder, dtype="bfloat16", **placement)
    loaded = perf_counter() - start
    pipe.model.generation_config.eos_token_id = NEVER
    count, tokens = pictures
    side = TOKEN_SIDE * round(tokens**0.5)
    noise = np.random.default_rng(0).integers(0, 256, (count, side, side, 3), dtype=np.uint8)
    for _ in range(2):  # The first answer is a warm-up.
        result = pipe(
            images=list(noise), prompt="What is it?", max_new_tokens=answer, temperature=0
        )
    peaks = {
        str(device): torch.cuda.max_memory_allocated(device) + bytes_in_ranges(device)[1]
        for device in devices
    }
    pipe.release_graphs()
    return {
        "load_s": loaded,
        "prompt_tokens": result.prompt_tokens,
        "prefill_s": result.timings.prefill_s,
        "ms": 1e3 / result.timings.tokens_per_s,
        "token_ids": result.token_ids,
        "kv": {name: n for name, n in result.memory.by_device.items() if name != "cpu"},
        "peak": {name: peak for name, peak in peaks.items() if peak},
    }


def by_ranks(folder: Path, gpus: int, pictures: tuple[int, int], answer: int) -> dict[str, Any]:
    """Measure a checkpoint by processes of torchrun; return rank 0's figures and the bytes of all
    ranks."""
    place = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    group = LaunchConfig(1, 1, gpus, max_restarts=0, start_method="forkserver", **place)
    elastic_launch(group, as_rank)(folder, *pictures, answer)
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(gpus)]
    sums = {
        kind: {k: v for rank in ranks for k, v in rank[kind].items()} for kind in ("kv", "peak")
    }
    return (
        ranks[0]
        | sums
        | {"ranks_agree": all(rank["token_ids"] == ranks[0]["token_ids"] for rank in ranks)}
    )


def as_rank(folder: Path, *numbers: int) -> None:
    """Measure a checkpoint in this rank, and write the figures to the checkpoint's folder."""
    figures = measure_placement(folder, {"tp_plan": "auto"}, numbers[:2], numbers[2])
    path = folder / f"rank-{distributed.get_rank()}.json"
    path.write_text(json.dumps(figures))
    distributed.destroy_process_group()


def measure(
    released: Released, gpus: int, pictures: tuple[int, int], answer: int
) -> list[dict[str, Any]]:
    """Measure each placement of the model, and return their rows."""
    device, rows = device_of(None), []
    with TemporaryDirectory(prefix="oscar-mm-") as name:
        folder = Path(name)
        model, processor = build(released, device, torch.bfloat16)
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
        del model
        for way, placement in {"one": {"device": device}, "layers": {"device_map": "auto"}}.items():
            release(device)
            rows.append({"way": way} | measure_placement(folder, placement, pictures, answer))
            print(f"{way}: {rows[-1]['ms']:.2f} ms a token", flush=True)
        release(device)
        rows.append({"way": "heads"} | by_ranks(folder, gpus, pictures, answer))
    expected = rows[0]["token_ids"]
    for row in rows:
        pairs = zip(row.pop("token_ids"), expected, strict=True)
        same = next((n for n, (a, b) in enumerate(pairs) if a != b), len(expected))
        row["same"] = f"{same} of {len(expected)}"
    return rows


def _with_two_kv_heads(released: Released) -> Released:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return replace(released, text=released.text | heads)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit code, 1 if the answers of ranks differ."""
    command_line = parser("benchmarks.several_gpus", __doc__)
    command_line.add_argument("--model", choices=RELEASED, default="qwen3-vl-8b")
    command_line.add_argument("--context", type=int, default=32768, help="tokens of images")
    command_line.add_argument("--gpus", type=int, default=2)
    command_line.add_argument("--tiny", action="store_true", help="trial run with a tiny model")
    options = command_line.parse_args(arguments)
    released = RELEASED[options.model].with_positions(options.context + 8192)
    pictures, answer = (max(1, options.context // 1024), 1024), 128
    if options.tiny:
        released, pictures, answer = _with_two_kv_heads(released.tiny()), (3, 16), 24
    rows = [
        {"model": options.model} | row for row in measure(released, options.gpus, pictures, answer)
    ]
    show(
        f"{options.model} on {options.gpus} GPUs",
        ("way", "tokens", "load s", "prefill s", "ms", "same", "GB", "KV GB"),
        (
            (
                *(row["way"], f"{row['prompt_tokens']:,}", f"{row['load_s']:.1f}"),
                *(f"{row['prefill_s']:.2f}", f"{row['ms']:.2f}", row["same"]),
                *(
                    " + ".join(f"{n / 1e9:.2f}" for n in row[kind].values())
                    for kind in ("peak", "kv")
                ),
            )
            for row in rows
        ),
    )
    device = device_name(device_of(None).type)
    record = Record(
        "several_gpus", command("benchmarks.several_gpus", arguments), device, [], NOTES
    )
    if earlier := record.earlier(options.out):
        record = record.continuing(earlier)
    others = [row for row in record.rows if row["model"] != options.model]
    record.rows = others + rows
    finish(record, options.out)
    return int(not rows[-1]["ranks_agree"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
