"""The table of peers: rows of four benchmarks, as they write them."""

import pytest

from benchmarks import peers
from benchmarks.record import Record, Row

MODEL = "qwen3-vl-8b"
STEPS = {"DynamicCache": 50.0, "bf16, graph": 5.0, "standard, graph": 4.0}
BATCHES = {"DynamicCache": (6, 47.0), "standard, graph": (46, 1100.0)}


def rows_of(name: str, arguments: list[str]) -> list[Row]:
    """Rows of a benchmark; one of each has failed."""
    row: Row = {"model": MODEL, "context": 2048}
    if name == "decode_step":
        if peers.COMPILED in arguments:
            return [row | {"way": "StaticCache, compiled", "error": "RuntimeError: no"}]
        return [row | {"way": way, "ms": ms} for way, ms in STEPS.items()]
    if name == "throughput":
        found = [
            row | {"way": way, "batch": count, "tokens_per_s": speed}
            for way, (count, speed) in BATCHES.items()
        ]
        # What ran out of memory was tried again with fewer.
        return [row | {"way": "DynamicCache", "error": "full", "out_of_memory": True}, *found]
    if name == "client_loop":
        load = {"prompt": 2000, "pictures": 0, "clients": 64, "rate": 0.0, "new_tokens": 400}
        speeds = {"oscar_mm": 3600.0, "vLLM": 3000.0}
        return [
            {"model": MODEL, "engine": engine, **load, "tokens/s": speed}
            for engine, speed in speeds.items()
        ]
    assert arguments[arguments.index("--model") + 1] == MODEL
    found = [
        {"model": MODEL, "attention": "auto", "what": "capacity", "tokens": 8},
        {"model": MODEL, "attention": "auto", "what": "one sequence 2048", "ms": 5.5},
        {"model": MODEL, "attention": "fp8", "what": "decode", "error": "exit code 1"},
        {
            "model": MODEL,
            "attention": "standard",
            "what": "full memory 2048",
            "sequences": 40,
            "tokens_per_s": 900.0,
            "ms": 44.0,
        },
    ]
    attention = arguments[arguments.index("--attention") + 1]
    return [row for row in found if row["attention"] == attention]


@pytest.mark.parametrize("has_vllm", [True, False])
def test_one_table(has_vllm: bool, tmp_path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "measured", rows_of)
    monkeypatch.setattr(peers, "find_spec", lambda name: has_vllm or None)
    assert peers.main(["--models", MODEL, "--out", str(tmp_path)]) == 1, "some have failed"
    printed = capsys.readouterr().out
    peer, times = ("vLLM, bf16", "1.38") if has_vllm else ("DynamicCache", "12.50")
    place = f"{MODEL}, 2,048 tokens, one sequence: standard, graph"
    assert f"{place} is {times} times as fast as {peer}" in printed
    assert "full memory: standard, graph is 23.40 times as fast as DynamicCache" in printed
    assert ("vLLM, our standard pages is 19.15 times" in printed) == has_vllm
    assert "64 clients, 2000 tokens: 1.20 of vLLM's tokens/s, at least 1.3: NOT met" in printed
    assert "46: 1100" in printed and "6: 47" in printed and "capacity" not in printed
    [path] = tmp_path.glob("peers-*.json")
    errors = [row["method"] for row in Record.load(path).rows if "error" in row]
    assert errors == ["StaticCache, compiled", *(["vLLM, fp8"] if has_vllm else [])]
    assert Record.load(path).extra == {"complete": True}


def test_a_run_that_is_cut_off_leaves_what_it_has_found(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(name: str, arguments: list[str]) -> list[Row]:
        if name == "throughput":
            raise KeyboardInterrupt
        return rows_of(name, arguments)

    monkeypatch.setattr(peers, "measured", cut)
    with pytest.raises(KeyboardInterrupt):
        peers.main(["--models", MODEL, "--contexts", "2048", "--out", str(tmp_path)])
    [path] = tmp_path.glob("peers-*.json")
    record = Record.load(path)
    assert [row["method"] for row in record.rows] == [*STEPS]
    assert record.extra == {"complete": False}


def test_formats_of_weights(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each benchmark runs with the models in all formats; those that are not there are named."""
    asked = list[tuple[str, str]]()

    def noted(name: str, arguments: list[str]) -> list[Row]:
        option = "--model" if name == "vllm_attention" else "--models"
        asked.append((name, arguments[arguments.index(option) + 1]))
        return []

    monkeypatch.setattr(peers, "measured", noted)
    monkeypatch.setattr(peers, "find_spec", lambda name: True)
    line = ["--models", MODEL, "--contexts", "2048", "--out", str(tmp_path)]
    assert peers.main([*line, "--weights", "bf16,fp8"]) == 0
    both = f"{MODEL},{MODEL}-fp8"
    ours = ("decode_step", "throughput", "client_loop")
    assert asked[:3] == [(name, both) for name in ours]
    others = [model for _, model in asked[3:]]
    half = len(others) // 2
    assert half >= 3 and others == [MODEL] * half + [f"{MODEL}-fp8"] * half
    with pytest.raises(SystemExit):
        peers.main([*line, "--weights", "int3"])


def test_a_benchmark_that_writes_nothing_is_an_error() -> None:
    [row] = peers.measured("no_such_benchmark", [])
    assert row["error"] == "exit code 1"
