"""Tables of README and docs/benchmarks.md have the numbers of the records in benchmarks/results."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.humaneval import change

ROOT = Path(__file__).parents[1]
BF16_BYTES = 32768 * 36 * 2 * 8 * 128 * 2
"""Bytes of 32,768 tokens of Qwen3-VL-8B in vLLM: layers, keys and values, heads, head size."""
README = (ROOT / "README.md").read_text()
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text()
MODELS = ("SmolLM2-135M-Instruct", "Qwen2.5-Coder-0.5B-Instruct", "Qwen2.5-Coder-1.5B-Instruct")
MODELS += ("Gemma-3-270M",)
METHODS = {
    "standard, 4-bit keys": "standard, keys 4 bit",
    "standard, keys 4 bits": "standard, keys 4 bit",
    "standard in vLLM": "blocks, window 32",
    "standard in vLLM, window=64": "blocks, window 64",
    "standard in vLLM, window=128": "blocks, window 128",
    "standard in vLLM, 2 bits": "blocks, 2 bit, window 32",
    "KVarN k4v2, as shipped with 192 exact tokens": "KVarN k4v2, own tokens",
    "TurboQuant 3bit_nc of vLLM, four layers in 16-bit precision": "TurboQuant 3bit_nc",
}
"""Rows that the pages name otherwise than the record."""
SUMMARY = {
    "step of one sequence, 8B, 2K tokens": ("h200", "8b", 2048, "standard, graph"),
    "the same, 32K": ("h200", "8b", 32768, "standard, graph"),
    "the same, 128K": ("h200, 23 November", "8b", 131072, "standard, graph"),
    "step of one sequence, 8B in FP8, 32K tokens": (
        "h200, FP8",
        "8b-fp8",
        32768,
        "standard, graph",
    ),
    "step of one sequence, 30B, 2K tokens": ("h100-80gb-hbm3", "30b-a3b", 2048, "standard, graph"),
    "step of one sequence, 30B in FP8, 32K tokens, H200": (
        "h200, FP8",
        "30b-a3b-fp8",
        32768,
        "standard, graph",
    ),
    "vLLM with our pages, 8B, 32K": ("h200", "8b", 32768, "vLLM, our standard pages"),
    "full memory, 8B, 32K tokens each": ("h200", "8b", "full", "standard, graph"),
    "full memory, 8B in FP8, 32K tokens each": ("h200, FP8", "8b-fp8", "full", "standard, graph"),
    "full memory, 30B, 32K tokens each": ("h100-80gb-hbm3", "30b-a3b", "full", "standard, graph"),
    "full memory, 30B in FP8, 32K tokens each, H200": (
        "h200, FP8",
        "30b-a3b-fp8",
        "full",
        "standard, graph",
    ),
    "the same, full memory": ("h200", "8b", "full", "vLLM, our standard pages"),
}
"""Rows of the summary that are of ``benchmarks.peers``: run, model, context, method."""
PEERS = {
    "h200": "peers-nvidia-h200",
    "h200, FP8": "peers-fp8-nvidia-h200",
    "h200, 23 November": "earlier/peers-nvidia-h200",
    "h100-80gb-hbm3": "peers-nvidia-h100-80gb-hbm3",
}
"""Records of runs."""


def record(name: str) -> list[dict[str, Any]]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["rows"]


def table(page: str, heading: str) -> dict[str, list[str]]:
    """Cells of the first table whose heading begins so, by the first cell of their row."""
    text = page[page.index(f"\n| {heading}") :].strip().partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines()]
    return {plain(row[0]): row[1:] for row in rows[2:]}


def plain(name: str) -> str:
    return re.sub(r"^oscar_mm ", "", re.sub(r"[`*]", "", name))


def numbers(cell: str) -> list[str]:
    return [text.replace(",", "") for text in re.findall(r"[-+]?\d[\d,]*\.?\d*", cell)]


def same(shown: str, measured: float) -> bool:
    """Whether a number is the measured one, rounded to as many digits as it shows."""
    step = 10 ** -len(shown.partition(".")[2])
    return float(shown) == pytest.approx(measured, abs=0.501 * step)


@pytest.mark.parametrize(
    ("page", "heading", "context", "keys"),
    [
        (README, "| bits | SmolLM2-135M", 1024, ("kl", "decoded_kl")),
        (BENCHMARKS, "1K tokens, decoded", 1024, ("decoded_kl",)),
        (BENCHMARKS, "1K tokens, stored", 1024, ("kl",)),
        (BENCHMARKS, "4K tokens, decoded", 4096, ("decoded_kl",)),
    ],
)
def test_divergences(page: str, heading: str, context: int, keys: tuple[str, ...]) -> None:
    """Each cell: the divergences, the standard error of the last, the rise in perplexity."""
    measured = {
        (row["model"], row["method"]): row
        for row in record("language-nvidia-h200")
        if row["context"] == context and "missing" not in row
    }
    rises = "perplexity_ratio" if keys == ("kl",) else "decoded_perplexity_ratio"
    compared = 0
    for name, cells in table(page, heading).items():
        for model, cell in zip(MODELS, cells[1:], strict=False):
            if not cell:
                continue
            row = measured[model, METHODS.get(name, name)]
            expected = [1000 * row[key] for key in keys]
            expected += [1000 * row[f"{keys[-1]}_error"], 100 * row[rises] - 100]
            assert all(map(same, numbers(cell), expected)), (name, model, cell, expected)
            compared += 1
    assert compared > 30


def test_bits() -> None:
    rows = [row for row in record("language-nvidia-h200") if row.get("page_bits")]
    shown = table(BENCHMARKS, "1K tokens, decoded") | table(README, "| bits | SmolLM2-135M")
    for name, cells in shown.items():
        method = METHODS.get(name, name)
        bits = [
            row["page_bits"] for row in rows if (row["method"], row["context"]) == (method, 1024)
        ]
        least, most = map(float, (numbers(cells[0]) * 2)[:2])
        assert (least, most) == pytest.approx((min(bits), max(bits)), abs=0.006), name


def speeds(run: str, model: str, where: int | str) -> dict[str, float]:
    """Milliseconds of a step, or tokens a second at full memory, by method."""
    rows = [row for row in record(PEERS[run]) if row["model"] == f"qwen3-vl-{model}"]
    if where == "full":
        return {row["method"]: row["tokens_per_s"] for row in rows if "full" in row}
    return {row["method"]: row["ms"] for row in rows if row.get("context") == where}


@pytest.mark.parametrize("name", SUMMARY)
def test_the_summary_names_the_best_other_program(name: str) -> None:
    run, model, where, method = SUMMARY[name]
    measured = speeds(run, model, where)
    others = {
        other: speed
        for other, speed in measured.items()
        if not other.startswith(("standard", "compact", "channel", "bf16", "vLLM, our"))
    }
    best = (
        max(others, key=others.__getitem__)
        if where == "full"
        else min(others, key=others.__getitem__)
    )
    [line] = [
        line.strip("| ").split(" | ")
        for line in BENCHMARKS.splitlines()
        if line.startswith(f"| {name} |")
    ][:1]
    ours, other, times = numbers(line[1])[0], numbers(line[2])[0], float(line[3])
    assert same(ours, measured[method]) and same(other, others[best])
    assert line[2].endswith(best.replace("vLLM, ", "vLLM "))
    ratio = measured[method] / others[best]
    assert times == pytest.approx(ratio if where == "full" else 1 / ratio, abs=0.006)


NAMES = {
    "standard": "standard, graph",
    "compact": "compact, graph",
    "channel": "channel, graph",
    "bf16": "bf16, graph",
    "vLLM, standard pages": "vLLM, our standard pages",
    "DynamicCache, SDPA": "DynamicCache",
    "StaticCache, torch.compile": "StaticCache, compiled",
}
"""Names of methods in the tables of peers, where they are not the record's."""


@pytest.mark.parametrize(
    ("heading", "run", "model"),
    [
        ("bf16 weights", "h200", "qwen3-vl-8b"),
        ("8B in FP8", "h200, FP8", "qwen3-vl-8b-fp8"),
        ("30B-A3B in FP8", "h200, FP8", "qwen3-vl-30b-a3b-fp8"),
        ("23 November", "h200, 23 November", "qwen3-vl-8b"),
        ("30B-A3B on an H100", "h100-80gb-hbm3", "qwen3-vl-30b-a3b"),
    ],
)
def test_peers(heading: str, run: str, model: str) -> None:
    """Each figure of the record is in its table, and no other."""
    cells = dict[str, dict[tuple[int, int], list[float]]]()
    for row in record(PEERS[run]):
        if row["model"] != model or "error" in row:
            continue
        if "clients" in row:
            name = {"oscar_mm": "standard, graph", "vLLM": "vLLM, bf16"}[row["engine"]]
            place, figures = (2, row["clients"]), [row["tokens/s"], row["first token p50 ms"]]
        elif "full" in row:
            name, place = row["method"], (1, row["full"])
            figures = [row["sequences"], row["tokens_per_s"]]
        else:
            name, place, figures = row["method"], (0, row["context"]), [row["ms"]]
        cells.setdefault(name, {})[place] = figures
    text = BENCHMARKS[BENCHMARKS.index("\n## Peers\n") :]
    shown = {NAMES.get(name, name): row for name, row in table(text, heading).items()}
    assert shown.keys() == cells.keys()
    for name, found in cells.items():
        expected = [figure for place in sorted(found) for figure in found[place]]
        row = [number for cell in shown[name] for number in numbers(cell)]
        assert len(row) == len(expected) and all(map(same, row, expected)), (name, row, expected)


def test_many_clients() -> None:
    """The README and the page tell the same figures, those of the latest runs."""
    rows = [row for row in record("client_loop-nvidia-h200") if not row.get("pictures")]
    flat = " ".join(README.split())
    for clients, prompt, model, name, in_readme in (
        (64, 2000, "qwen3-vl-8b", "8B", True),
        (64, 2000, "qwen3-vl-30b-a3b", "30B", False),
        (64, 2000, "qwen3-vl-8b-fp8", "8B in FP8", False),
        (256, 500, "qwen3-vl-8b", "8B", True),
    ):
        ours, theirs = (
            next(
                row["tokens/s"]
                for row in reversed(rows)
                if (row["clients"], row["prompt"], row["model"]) == (clients, prompt, model)
                and row["engine"] == engine
            )
            for engine in ("oscar_mm", "vLLM")
        )
        load = f"{clients} clients, prompts of {prompt:,} tokens, {name}"
        [line] = re.findall(rf"^\| {load} \|.*$", BENCHMARKS, re.MULTILINE)
        assert f"{ours:,.0f} tokens/s | {theirs:,.0f} tokens/s, vLLM" in line
        assert f" | {ours / theirs:.2f} |" in line
        if in_readme:
            assert f"{ours:,.0f}" in flat and f"{theirs:,.0f}" in flat


def test_runs_of_serving() -> None:
    """Each run of the tables is listed once, and rows of the client loop are the record's."""
    text = BENCHMARKS.partition("\n## Serving\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([A-Z]+) \| (.*) \|$", text, re.MULTILINE)
    listed = re.findall(r"^- \*\*([A-Z]+)\*\*: ", text, re.MULTILINE)
    assert len(rows) > 40 and {run for run, _ in rows} == {*listed}
    assert len({*listed}) == len(listed)
    shown = [row for _, row in rows if re.search(r"\| (vLLM|oscar_mm) \|", row)]
    measured = record("client_loop-nvidia-h200")
    assert len(shown) == len(measured)
    for row in shown:
        engine = "vLLM" if "| vLLM |" in row else "oscar_mm"
        cells = row.partition(f"| {engine} | ")[2].split(" | ")
        keys = ("tokens/s", "first token p50 ms", "between tokens p50 ms")
        assert any(
            one["engine"] == engine
            and all(same(numbers(cell)[0], one[key]) for cell, key in zip(cells, keys, strict=True))
            for one in measured
        ), row


def test_steps_of_the_readme() -> None:
    shown = table(README, "Shape of Qwen3-VL-8B")
    steps, full = speeds("h200", "8b", 32768), speeds("h200", "8b", "full")
    # Other processes used the host meanwhile; the earlier run is fairer to transformers.
    earlier = "h200, 23 November"
    for x, where in ((steps, 32768), (full, "full")):
        x["DynamicCache"] = speeds(earlier, "8b", where)["DynamicCache"]
    for name, method in {
        "standard, the default": "standard, graph",
        "compact": "compact, graph",
        "vLLM 0.25 with oscar_mm's standard pages": "vLLM, our standard pages",
        "vLLM 0.25, bf16": "vLLM, bf16",
        "vLLM 0.25, fp8": "vLLM, fp8",
        "transformers: DynamicCache, SDPA": "DynamicCache",
    }.items():
        _, step, throughput = shown[name]
        assert same(numbers(step)[0], steps[method]), name
        assert same(numbers(throughput)[1], full[method]), name


def test_sizes_of_caches() -> None:
    """In vLLM, a cache takes the memory of a GPU divided by the tokens that fit."""
    steps = {
        row["way"]: row["kv_bytes"]
        for row in record("decode_step-nvidia-h200")
        if row["model"] == "qwen3-vl-8b" and "kv_bytes" in row
        if (row["context"], row["batch"]) == (32768, 1)
    }
    fit = {
        row["attention"]: row["tokens"]
        for row in record("vllm_attention-nvidia-h200")
        if (row["model"], row["what"]) == ("qwen3-vl-8b", "capacity")
    }
    sizes = {
        "standard, the default": steps["standard, graph"],
        "compact": steps["compact, graph"],
        "oscar_mm, 16-bit": steps["bf16, graph"],
        "transformers: DynamicCache, SDPA": steps["DynamicCache"],
        "transformers: StaticCache, torch.compile": steps["StaticCache, compiled"],
        "transformers: QuantizedCache, hqq, 2 bits": steps["QuantizedCache, hqq 2 bit"],
    }
    for name, attention in {
        "vLLM 0.25 with oscar_mm's standard pages": "standard",
        "vLLM 0.25, bf16": "auto",
        "vLLM 0.25, fp8": "fp8",
    }.items():
        sizes[name] = BF16_BYTES * fit["auto"] / fit[attention]
    shown = {name: numbers(cells[0])[0] for name, cells in table(README, "Shape of Qwen").items()}
    assert {*shown} == {*sizes}
    for name, size in sizes.items():
        assert same(shown[name], size / 1e9), (name, size)
    [line] = [x.split(" | ") for x in BENCHMARKS.splitlines() if "beside the smallest" in x]
    smallest = sizes["transformers: QuantizedCache, hqq, 2 bits"]
    ours = [sizes["standard, the default"], sizes["compact"]]
    assert all(map(same, numbers(line[1]), [size / 1e9 for size in ours]))
    assert same(numbers(line[2])[0], smallest / 1e9)
    assert all(map(same, numbers(line[3]), [smallest / size for size in ours]))


def test_programs() -> None:
    """Each row of HumanEval's record is in the table, and no other."""
    text = BENCHMARKS[BENCHMARKS.index("\n### Programs") :].partition("\n### Q")[0]
    cells = re.findall(r"^\| (Qwen\S+) \| (.+?) \|$", text, re.MULTILINE)
    shown = {(model, *plain(rest).split(" | ")[:1]): numbers(rest) for model, rest in cells}
    rows = record("humaneval-amd-epyc")
    assert len(shown) == len(rows) > 6
    for row in rows:
        model = row["model"].removesuffix("-Instruct")
        name = "16 bits" if row["policy"] == "bf16" else row["policy"]
        passed = [row["passed"], row["problems"]]
        if name == "16 bits":
            expected = [16, *passed]
        else:
            expected = [*passed, 100 * row["same"], row["lost"], row["gained"]]
            expected += [100 * part for part in change(row)] + [row["ratio"]]
        assert all(map(same, shown[model, name], expected)), (model, name, shown[model, name])
        assert len(shown[model, name]) == len(expected)


@pytest.mark.parametrize("task", ["humaneval", "words"])
def test_solved_problems(task: str) -> None:
    """Each method of the record is in the table of its task, and no other."""
    rows = [row for row in record("solved-amd-epyc") if row["task"] == task]
    kind = {"humaneval": "programs", "words": "word problems"}[task]
    shown = table(BENCHMARKS, f"cache | bits held | {kind}")
    assert len(shown) == len(rows) > 9
    for row in rows:
        name = row["method"].removesuffix(", own tokens")
        cells = shown["16 bits" if name == "16 bit" else name]
        expected = [row["bits"], row["passed"]]
        if name == "16 bit":
            expected.append(row["problems"])
        else:
            expected += [100 * row["same"], row["lost"], row["gained"]]
            expected += [100 * part for part in change(row)] + [row["packed"]]
        found = [number for cell in cells for number in numbers(cell)]
        assert len(found) == len(expected) and all(map(same, found, expected)), (row, found)


def test_marked_cells() -> None:
    """A dagger marks a higher divergence than that of a format with up to 0.75 bits more; no format
    has as few bits and a lower divergence."""
    rows = {
        (row["model"], row["method"]): row
        for row in record("language-nvidia-h200")
        if row["context"] == 1024 and "missing" not in row
    }
    shown = table(README, "| bits | SmolLM2-135M")
    ours = [name for name in shown if name.startswith(("compact", "standard"))]
    for place, model in enumerate(MODELS, 1):
        others = [rows[model, METHODS.get(name, name)] for name in shown if name not in ours]
        for name in ours:
            row = rows[model, METHODS.get(name, name)]
            ahead = [
                other["page_bits"] - row["page_bits"]
                for other in others
                if any(other[key] < row[key] for key in ("kl", "decoded_kl"))
            ]
            assert min(ahead, default=1) > 0, (model, name)
            assert ("†" in shown[name][place]) == (min(ahead, default=1) <= 0.75), (model, name)
