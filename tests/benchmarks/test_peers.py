"""The table of peers: rows of four benchmarks, as they write them."""

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from benchmarks import peers
from benchmarks.record import Record, Row

MODEL = "qwen3-vl-8b"
STEPS = {"DynamicCache": 50.0, "bf16, graph": 5.0, "standard, graph": 4.0}
BATCHES = {"DynamicCache": (6, 47.0), "standard, graph": (46, 1100.0)}


LOAD = {"prompt": 2000, "pictures": 0, "clients": 64, "rate": 0.0, "new_tokens": 400}
SPEEDS = {"oscar_mm": 3600.0, "vLLM": 3000.0}


def rows_of(name: str, arguments: list[str], seconds: float) -> list[Row]:
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
    raise AssertionError(name)


class Child:
    """Process of a part, whose rows are known; ``events`` tells what happened when."""

    events: list[tuple[str, str]]

    def __init__(self, module: str, spec: dict[str, Any]) -> None:
        assert module == f"benchmarks.{'client_loop' if 'engine' in spec else 'vllm_attention'}"
        self.spec = spec
        self._note("starts")

    def _note(self, what: str) -> None:
        self.events.append((what, self.spec.get("engine") or self.spec["attention"]))

    def finish(self, seconds: float) -> tuple[list[Row], str | None]:
        self._note("runs")
        if "engine" in self.spec:
            engine, [loop] = self.spec["engine"], self.spec["loops"]
            assert loop.items() >= LOAD.items()
            row = {"model": MODEL, "engine": engine, **LOAD}
            return [row | {"tokens/s": SPEEDS[engine]}], None
        attention = self.spec["attention"]
        row = {"model": self.spec["model"], "attention": attention}
        full = {"sequences": 40, "tokens_per_s": 900.0, "ms": 44.0}
        rows = {
            "auto": [{"what": "capacity", "tokens": 8}, {"what": "one sequence 2048", "ms": 5.5}],
            "standard": [{"what": "full memory 2048"} | full],
        }
        found = [row | one for one in rows.get(attention, [])]
        return found, "exit code 1" if attention == "fp8" else None

    def stop(self) -> None:
        self._note("is stopped")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What happened to the processes of parts, in order."""
    monkeypatch.setattr(peers, "Child", Child)
    monkeypatch.setattr(Child, "events", [], raising=False)
    monkeypatch.setattr(peers, "measured", rows_of)
    monkeypatch.setattr(peers, "vllm_versions", lambda: {"vllm": "0.25.0"})
    monkeypatch.setattr(peers, "find_spec", lambda name: True)
    return Child.events


@pytest.mark.parametrize("has_vllm", [True, False])
def test_one_table(
    has_vllm: bool, events, tmp_path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: has_vllm or None)
    assert peers.main(["--models", MODEL, "--out", str(tmp_path)]) == 1, "some have failed"
    printed = capsys.readouterr().out
    peer, times = ("vLLM, bf16", "1.38") if has_vllm else ("DynamicCache", "12.50")
    place = f"{MODEL}, 2,048 tokens, one sequence: standard, graph"
    assert f"{place} is {times} times as fast as {peer}" in printed
    assert "full memory: standard, graph is 23.40 times as fast as DynamicCache" in printed
    assert ("vLLM, our standard pages is 19.15 times" in printed) == has_vllm
    load = "64 clients, 2000 tokens: 1.20 of vLLM's tokens/s, at least 1.3: NOT met"
    assert (load in printed) == has_vllm
    assert "46: 1100" in printed and "6: 47" in printed and "capacity" not in printed
    [path] = tmp_path.glob("peers-*.json")
    record = Record.load(path)
    errors = [row["method"] for row in record.rows if "error" in row]
    assert errors == [*(["vLLM, fp8"] if has_vllm else []), "StaticCache, compiled"]
    assert record.extra["complete"] and ("vllm" in record.versions) == has_vllm


def test_a_run_that_is_cut_off_leaves_what_it_has_found(
    events, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(name: str, arguments: list[str], seconds: float) -> list[Row]:
        if name == "throughput":
            raise KeyboardInterrupt
        return rows_of(name, arguments, seconds)

    monkeypatch.setattr(peers, "measured", cut)
    with pytest.raises(KeyboardInterrupt):
        peers.main(["--models", MODEL, "--contexts", "2048", "--out", str(tmp_path)])
    [path] = tmp_path.glob("peers-*.json")
    record = Record.load(path)
    assert [row["method"] for row in record.rows] == [*STEPS]
    assert not record.extra["complete"]
    assert events == [("starts", "oscar_mm"), ("is stopped", "oscar_mm")]


def test_a_process_starts_while_the_one_before_it_measures(events, tmp_path) -> None:
    peers.main(["--models", MODEL, "--contexts", "2048", "--out", str(tmp_path)])
    names = [*SPEEDS, *peers.ATTENTIONS]
    expected = [("starts", names[0])]
    for name, following in pairwise([*names, None]):
        expected += [("starts", following)] * (following is not None) + [("runs", name)]
    assert events == expected


def test_what_a_limit_cuts_off_is_an_error(events, tmp_path, monkeypatch) -> None:
    times = iter([0.0, *[1.0] * 4, *[99.0] * 99])
    monkeypatch.setattr(peers.Clock, "_now", lambda _: next(times))
    line = ["--models", MODEL, "--contexts", "2048", "--limit", "50", "--out", str(tmp_path)]
    assert peers.main(line) == 1
    [path] = tmp_path.glob("peers-*.json")
    rows = Record.load(path).rows
    cut = [row["method"] for row in rows if "left no time" in row.get("error", "")]
    assert cut == ["vLLM", *peers.ATTENTIONS.values()]
    assert [name for what, name in events if what == "runs"] == ["oscar_mm"]
    assert len([name for what, name in events if what == "is stopped"]) == len(cut)


def test_formats_of_weights(events, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each benchmark runs with the models in all formats; those that are not there are named."""
    asked = list[tuple[str, str]]()

    def noted(name: str, arguments: list[str], seconds: float) -> list[Row]:
        asked.append((name, arguments[arguments.index("--models") + 1]))
        return []

    monkeypatch.setattr(peers, "measured", noted)
    found = list[str]()
    monkeypatch.setattr(Child, "_note", lambda self, what: found.append(model_of(self.spec)))
    line = ["--models", MODEL, "--contexts", "2048", "--out", str(tmp_path)]
    assert peers.main([*line, "--weights", "bf16,fp8"]) == 1, "vLLM's fp8 cache has failed"
    both = f"{MODEL},{MODEL}-fp8"
    assert asked == [(name, both) for name in ("decode_step", "throughput")]
    assert Counter(found) == dict.fromkeys(both.split(","), 2 * (2 + len(peers.ATTENTIONS)))
    with pytest.raises(SystemExit):
        peers.main([*line, "--weights", "int3"])


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (["--limit", "0"], "--limit 0: must be more than 0 seconds"),
        (["--limit", "nan"], "--limit nan: must be"),
        (["--contexts", "2048,"], "--contexts 2048,: must be numbers of tokens, comma-separated"),
        (["--full", "32k"], "--full 32k: must be numbers"),
    ],
)
def test_wrong_arguments_start_nothing(wrong, expected, events, tmp_path, capsys) -> None:
    """And an earlier record stays."""
    with pytest.raises(SystemExit):
        peers.main([*wrong, "--out", str(tmp_path)])
    assert expected in capsys.readouterr().err
    assert not events and not [*tmp_path.iterdir()]


def model_of(spec: dict[str, Any]) -> str:
    return spec["loops"][0]["model"] if "engine" in spec else spec["model"]


@pytest.mark.parametrize(("seconds", "error"), [(60.0, "exit code 1"), (0.0, "more than 0 s")])
def test_a_benchmark_that_writes_nothing_is_an_error(seconds: float, error: str) -> None:
    [row] = peers.measured("no_such_benchmark", [], seconds)
    assert row["error"] == error
