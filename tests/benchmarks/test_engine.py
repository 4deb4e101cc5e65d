"""The benchmark of the engine with small models on a CPU."""

from collections.abc import Callable

import pytest
import torch

from benchmarks import decode_step, engine
from benchmarks.cache_variants import Decoder
from benchmarks.decode_step import STEPS, WARM_UP
from benchmarks.record import Record
from oscar_mm.cache.page_store import PageStore
from oscar_mm.engine.sampling import SampledTokens
from oscar_mm.errors import MemoryBusy

pytestmark = pytest.mark.usefixtures("quick_collection")
COMPACT = engine.WAYS["compact-graph"]


@pytest.mark.slow
def test_a_dry_run(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--tiny", "--models", "qwen3-vl-8b,llava-1.6-vicuna-7b", "--batches", "1,3"]
    assert engine.main([*arguments, "--out", str(tmp_path)]) == 0
    [path] = tmp_path.iterdir()
    rows = Record.load(path).rows
    models = ("qwen3-vl-8b", "llava-1.6-vicuna-7b")
    cells = [(model, way, n) for model in models for way in ("compact", "standard") for n in (1, 3)]
    assert [(row["model"], row["way"], row["batch"]) for row in rows] == cells
    for row in rows:
        assert row["context"] == engine.TINY_CONTEXTS[0]
        assert row["tokens_per_s"] == pytest.approx(1e3 * row["batch"] / row["ms"])
        assert row["share"] == pytest.approx(row["loop_ms"] / row["ms"])
        assert 0 < row["host_ms"] <= row["ms"] and 0 < row["loop_host_ms"] <= row["loop_ms"]
        reading = row["reading"]
        assert reading["prompt_tokens"] == row["context"]
        # A prompt that is short is read at once.
        assert reading["tokens"] >= 0 and reading["tokens"] % row["batch"] == 0
        assert reading["share"] == pytest.approx(reading["tokens_per_s"] / row["tokens_per_s"])
        assert reading["alone_s"] > 0
    assert "of loop" in capsys.readouterr().out


@torch.inference_mode()
def test_rows_become_caches_of_their_own(decoder: Decoder) -> None:
    pipe = decoder.pipe.with_policy("compact")
    cache = pipe.new_cache()
    COMPACT.store_prompt(cache, decoder, 3, 600, COMPACT.slots(600, 1), more=1)
    expected = [keys.clone() for keys in cache.unpacked(1)[0]]
    used = {bits: slots.used for bits, slots in pipe.store.allocators.items()}
    apart = engine._rows_apart(cache)
    assert cache.closed and [one.batch_size for one in apart] == [1, 1, 1]
    for one, keys in zip(apart, expected, strict=True):
        assert torch.equal(one.unpacked(1)[0][0], keys)
    # Each slot has one owner, so that no page is copied before tokens are added to it.
    assert {bits: slots.used for bits, slots in pipe.store.allocators.items()} == used
    for one in apart:
        one.close()
    assert not any(slots.used for slots in pipe.store.allocators.values())
    # Another row fits without growth.
    assert all(slots.free >= COMPACT.slots(600, 1)[bits] * 4 for bits, slots in _slots(pipe.store))


def _slots(store: PageStore) -> list:
    return list(store.allocators.items())


def without_memory(refuses: Callable[[int], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have an admission refuse prompts of some lengths."""

    def reserve(self: object, growth: object, prompt: object, *rest: object) -> None:
        if refuses(prompt.tokens):
            raise MemoryBusy("there is none")

    monkeypatch.setattr("oscar_mm.admission.admission.Admission.reserve", reserve)


def test_a_prompt_without_memory_is_not_read(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_memory(lambda tokens: tokens >= 400, monkeypatch)
    row = engine.measure_engine(decoder, COMPACT, 400, 1e9, 2)
    assert row["reading"] == {"error": "there is no room for the prompt"}
    assert row["tokens_per_s"] > 0 and "error" not in row
    engine.report([row])
    assert "no room for the prompt" in capsys.readouterr().out


def test_an_answer_that_fails_is_in_the_row(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_memory(lambda tokens: True, monkeypatch)
    row = engine.measure_engine(decoder, COMPACT, 400, 1e9, 2)
    assert row["error"] == "MemoryBusy: there is none" and row["out_of_memory"] is False


def test_verdicts() -> None:
    row = {
        "model": "m",
        "way": "compact",
        "batch": 16,
        "context": engine.BOUND_CONTEXT,
        "share": 0.91,
        "reading": {"share": 0.49},
    }
    without = row | {"share": 0.89, "reading": {"error": "there is no room for the prompt"}}
    rows = [row, without, row | {"context": 400}, {"model": "m", "error": "out of memory"}]
    assert [(bound["found"], bound["met"]) for bound in engine.bounds(rows)] == [
        (0.91, True),
        (0.49, False),
        (0.89, False),
    ]


def test_host_time_is_what_waits_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(decode_step, "perf_counter", lambda: clock[0])

    def listed(tokens: SampledTokens) -> list[int]:
        clock[0] += 0.003
        return []

    monkeypatch.setattr(SampledTokens, "listed", listed)
    tokens = SampledTokens(torch.zeros(0), torch.zeros(0), None)
    steps: list[int] = []

    def step() -> None:
        steps.append(1)
        clock[0] += 0.002
        tokens.listed()

    assert decode_step.step_ms(step) == pytest.approx((5.0, 2.0))
    assert len(steps) == WARM_UP + STEPS and SampledTokens.listed is listed
