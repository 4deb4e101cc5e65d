"""The table of peers: rows of four benchmarks, as they write them."""

import json
import os
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import peers
from benchmarks.cache_variants import Decoder
from benchmarks.record import Record, Row
from benchmarks.vllm_process import CHILD

MODEL = "qwen3-vl-8b"
STEPS = {"DynamicCache": 50.0, "bf16, graph": 5.0, "standard, graph": 4.0}
BATCHES = {"DynamicCache": (6, 47.0), "standard, graph": (46, 1100.0)}


LOAD = {"prompt": 2000, "pictures": 0, "clients": 64, "rate": 0.0, "new_tokens": 400}
SPEEDS = {"oscar_mm": 3600.0, "vLLM": 3000.0}


def loops(spec: dict[str, Any]) -> tuple[list[Row], str | None]:
    """Rows of our caches and those of transformers; the compiled cache has failed."""
    row: Row = {"model": spec["model"], "context": 2048}
    if spec["ways"] == [peers.COMPILED]:
        return [row | {"way": "StaticCache, compiled", "error": "RuntimeError: no"}], None
    steps = [row | {"way": way, "ms": ms} for way, ms in STEPS.items()]
    row |= {"row_bytes": 10}
    batches = [
        row | {"way": way, "batch": count, "tokens_per_s": speed}
        for way, (count, speed) in BATCHES.items()
    ]
    # What ran out of memory was tried again with fewer.
    full = row | {"way": "DynamicCache", "error": "full", "out_of_memory": True}
    return [*steps, full, *batches], None


class Child:
    """Process of a part, whose rows are known; ``events`` tells what happened when."""

    events: list[tuple[str, str]]

    def __init__(self, module: str, spec: dict[str, Any]) -> None:
        kinds = {"engine": "client_loop", "attention": "vllm_attention", "ways": "peers"}
        assert [module] == [f"benchmarks.{kinds[x]}" for x in kinds if x in spec]
        self.spec = spec
        self._note("starts")

    def _note(self, what: str) -> None:
        self.events.append((what, name_of(self.spec)))

    def finish(self, seconds: float) -> tuple[list[Row], str | None]:
        self._note("runs")
        if "ways" in self.spec:
            return loops(self.spec)
        if "engine" in self.spec:
            engine, [loop] = self.spec["engine"], self.spec["loops"]
            assert loop.items() >= LOAD.items()
            row = {"model": loop["model"], "engine": engine, **LOAD}
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


def name_of(spec: dict[str, Any]) -> str:
    return spec.get("engine") or spec.get("attention") or "+".join(spec["ways"])


WAYS, COMPILED = "+".join(peers.WAYS), peers.COMPILED
FIRST, *OTHERS = peers.ATTENTIONS
ORDER = [WAYS, FIRST, *SPEEDS, *OTHERS]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What happened to the processes of parts, in order."""
    monkeypatch.setattr(peers, "Child", Child)
    monkeypatch.setattr(Child, "events", [], raising=False)
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
    finish = Child.finish

    def cut(child: Child, seconds: float) -> tuple[list[Row], str | None]:
        if "attention" in child.spec:
            raise KeyboardInterrupt
        return finish(child, seconds)

    monkeypatch.setattr(Child, "finish", cut)
    with pytest.raises(KeyboardInterrupt):
        peers.main(["--models", MODEL, "--contexts", "2048", "--out", str(tmp_path)])
    [path] = tmp_path.glob("peers-*.json")
    record = Record.load(path)
    assert [row["method"] for row in record.rows] == [*STEPS, *BATCHES]
    assert not record.extra["complete"]
    starts = [("starts", name) for name in ORDER[:3]]
    assert events == [starts[0], ("runs", WAYS), *starts[1:], ("is stopped", ORDER[2])]


def test_a_process_starts_while_the_one_before_it_measures(events, tmp_path) -> None:
    """And the most important parts come first, with nothing beside transformers' eager steps."""
    peers.main(["--models", MODEL, "--contexts", "2048,32768", "--out", str(tmp_path)])
    names = [*ORDER, COMPILED]
    expected = [("starts", names[0]), ("runs", names[0]), ("starts", names[1])]
    for name, following in pairwise([*names[1:], None]):
        expected += [("starts", following)] * (following is not None) + [("runs", name)]
    assert events == expected


def test_attentions_of_vllm_are_chosen_and_clients_left_out(events, tmp_path) -> None:
    line = ["--models", f"{MODEL}-fp8", "--contexts", "2048", "--out", str(tmp_path)]
    assert peers.main([*line, "--attentions", "fp8,auto", "--seconds", "0"]) == 1
    ours = "+".join(way for way in peers.WAYS if way != "dynamic")
    assert [name for what, name in events if what == "runs"] == [ours, "fp8", "auto"]


def test_what_a_limit_cuts_off_is_an_error(events, tmp_path, monkeypatch) -> None:
    times = iter([0.0, *[1.0] * 4, *[99.0] * 99])
    monkeypatch.setattr(peers.Clock, "_now", lambda _: next(times))
    line = ["--models", MODEL, "--contexts", "2048", "--limit", "50", "--out", str(tmp_path)]
    assert peers.main(line) == 1
    [path] = tmp_path.glob("peers-*.json")
    rows = Record.load(path).rows
    cut = [row["method"] for row in rows if "left no time" in row.get("error", "")]
    assert cut == ["oscar_mm", "vLLM", *(peers.ATTENTIONS[name] for name in OTHERS)]
    assert [name for what, name in events if what == "runs"] == [WAYS, FIRST]
    assert len([name for what, name in events if what == "is stopped"]) == len(cut)


def test_a_part_has_the_time_that_the_run_and_its_own_limit_leave(monkeypatch) -> None:
    now = iter([0.0, 10.0, 95.0, 120.0, 5.0])
    monkeypatch.setattr(peers.Clock, "_now", lambda _: next(now))
    clock = peers.Clock(100.0, part=40.0)
    assert [clock.left for _ in range(3)] == [40.0, 5.0, -20.0]
    assert peers.Clock(None, part=40.0).left == 40.0


def test_formats_of_weights(events, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part runs with the model in all formats; those that are not there are named."""
    found = list[tuple[str, str]]()
    monkeypatch.setattr(
        Child, "_note", lambda self, what: found.append((model_of(self.spec), name_of(self.spec)))
    )
    line = ["--models", MODEL, "--contexts", "2048", "--out", str(tmp_path)]
    assert peers.main([*line, "--weights", "bf16,fp8"]) == 1, "vLLM's fp8 cache has failed"
    ours = "+".join(way for way in peers.WAYS if way != "dynamic")
    expected = [(MODEL, name) for name in ORDER]
    expected += [(f"{MODEL}-fp8", name) for name in (ours, *ORDER[1:])]
    assert Counter(found) == dict.fromkeys(expected, 2)
    with pytest.raises(SystemExit):
        peers.main([*line, "--weights", "int3"])


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (["--limit", "0"], "--limit 0: must be more than 0 seconds"),
        (["--limit", "nan"], "--limit nan: must be"),
        (["--part-limit", "-1"], "--part-limit -1: must be more than 0 seconds"),
        (["--contexts", "2048,"], "--contexts 2048,: must be numbers of tokens, comma-separated"),
        (["--full", "32k"], "--full 32k: must be numbers"),
        (["--attentions", "auto,fp4"], "--attentions: there is no fp4; there are auto, fp8,"),
        (["--seconds", "-1"], "--seconds -1: must be at least 0"),
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


@pytest.mark.usefixtures("quick_collection")
def test_steps_and_batches_of_one_decoder(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compact holds more sequences than transformers' cache; 16-bit ours is not asked."""
    monkeypatch.setattr(peers, "Decoder", lambda *_, tiny: decoder)
    place = {"device": "cpu", "tiny": True}
    ways = ("dynamic", "bf16-graph", "compact-graph")
    part = peers.our_part(place, MODEL, ways, contexts=[300], full=[400])
    rows, begin = tmp_path / "rows", tmp_path / "begin"
    begin.touch()
    paths = {"rows": str(rows), "begin": str(begin), "parent": os.getppid()}
    assert peers.main([CHILD, json.dumps(part.spec | paths)]) == 0
    found = list(part.rows([json.loads(row) for row in rows.read_text().splitlines()], None))
    titles = [peers.VARIANTS[way].title for way in ways]
    steps = [row["method"] for row in found if row.get("context") == 300 and row["ms"] > 0]
    assert sorted(steps) == sorted(titles)
    full = {row["method"]: row["sequences"] for row in found if row.get("full") == 400}
    assert full.keys() == {titles[0], titles[2]} and 0 < full[titles[0]] < full[titles[2]]
    assert len(found) == 5


def test_loops_that_end_early_are_an_error() -> None:
    part = peers.our_part({"device": "cpu", "tiny": True}, MODEL, peers.WAYS)
    row = {"model": MODEL, "way": "DynamicCache", "context": 300, "ms": 5.0}
    found = list(part.rows([row], "more than 9 s"))
    assert found[0] == {"model": MODEL, "method": "DynamicCache", "context": 300, "ms": 5.0}
    assert found[1]["model"] == MODEL and found[1]["error"] == "more than 9 s"
