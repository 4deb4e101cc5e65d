"""The benchmark of full-size models, with the same models in small."""

from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from benchmarks import full_size
from benchmarks.allocator import allocated, held
from benchmarks.conversation import TINY
from benchmarks.random_model import FAMILIES, build
from benchmarks.record import Record
from benchmarks.released import RELEASED
from benchmarks.replay import Call, difference, joined, recorded, replay, with_steps
from oscar_mm import OscarCache, OscarVLPipeline
from oscar_mm.generation.prompt import Prompt
from tests.prompts import noise

# As the hub counts the safetensors of each; Omni's without talker (its Thinking checkpoint).
BILLIONS = {
    "llava-1.6-vicuna-7b": 7.06,
    "llava-1.6-mistral-7b": 7.57,
    "qwen3-vl-8b": 8.77,
    "qwen3-vl-30b-a3b": 31.1,
    "qwen3-omni-30b-a3b": 31.7,
}
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", RELEASED)
def test_full_size_has_the_released_number_of_parameters(name: str) -> None:
    model_class, config, _ = FAMILIES[RELEASED[name].family](RELEASED[name])
    with torch.device("meta"):
        model = model_class._from_config(config, dtype=torch.bfloat16)
    count = sum(weight.numel() for weight in model.parameters())
    assert count / 1e9 == pytest.approx(BILLIONS[name], rel=2e-3)


@pytest.mark.parametrize("name", RELEASED)
def test_buffers_are_those_of_a_model_made_the_usual_way(name: str) -> None:
    released = RELEASED[name].with_positions(50000)
    model, _ = build(released.tiny(), CPU, torch.bfloat16)
    assert model.config.get_text_config().max_position_embeddings >= 50000
    usual = type(model)._from_config(model.config, dtype=torch.bfloat16)
    expected = dict(usual.named_buffers())
    assert any("inv_freq" in buffer for buffer in expected)
    for buffer, values in model.named_buffers():
        assert torch.equal(values, expected[buffer]), buffer
    assert all(bool(weight.isfinite().all()) for weight in model.parameters())
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


def test_a_model_of_each_family_in_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(full_size, "LONGER", {"llava-1.6-vicuna-7b": (2 * full_size.CONTEXT,)})
    names = ("llava-1.6-vicuna-7b", "qwen3-vl-8b", "qwen3-omni-30b-a3b")
    arguments = ["--tiny", "--models", ",".join(names), "--out", str(tmp_path)]
    assert full_size.main(arguments) == 0
    [path] = tmp_path.iterdir()
    record = Record.load(path)
    assert [row["model"] for row in record.rows] == [names[0], *names]
    assert record.extra["failures"] == {}
    longer = record.rows.pop(1)
    assert longer["context"] == 2 * full_size.TINY_CONTEXT and "kept" not in longer
    for row in (longer, record.rows[0]):
        # In 16 bit are sinks and window, less than a page of text and of images, and what an
        # answer has to spare, however long the prompt is.
        memory = row["memory"]
        token = memory["bf16_bytes"] / sum(memory["tokens"].values())
        assert 0 < memory["by_kind"]["tails"] <= (4 + 32 + 2 * 127 + 32) * token
    assert longer["memory"]["by_kind"]["codes"] > record.rows[0]["memory"]["by_kind"]["codes"] > 0
    assert longer["chunked"]["chunk"] == TINY.chunk < longer["prompt_tokens"] / 4
    assert longer["chunked"]["prefill_ms"] > 0
    for row in record.rows:
        assert full_size.TINY_CONTEXT * 0.75 < row["prompt_tokens"] <= full_size.TINY_CONTEXT
        held = row["memory"]["tokens"]
        assert sum(held.values()) == row["prompt_tokens"] + TINY.answer - 1
        assert bool(held["audio"]) == bool(row["audio_s"]) == ("omni" in row["model"])
        assert row["same_after_load"] and row["freed_bytes"] > 0
        assert 0 < row["kept"]["difference"] < 0.05 and row["kept"]["dynamic"] < 0.05
        assert all(ms > 0 for cache in ("oscar", "dynamic") for ms in row["ms"][cache].values())
        assert row["ms"]["tokens"]["turn_text"] > TINY.text
        assert row["ms"]["tokens"]["turn_picture"] > row["ms"]["tokens"]["turn_text"]
        assert bool(row["experts"]) == ("30b" in row["model"])
        assert set(row["kernels"].values()) == {False}, "there is no GPU"
        figures = {bound["figure"]: bound for bound in row["bounds"]}
        assert figures["kept logits"]["met"] and not figures["saved / 16 bit"]["met"]
    printed = capsys.readouterr().out
    rows = [*record.rows, longer]
    assert printed.count("at most") == sum(len(row["bounds"]) for row in rows)


@pytest.fixture(scope="module")
def pipe() -> OscarVLPipeline:
    model, processor = build(RELEASED["qwen3-vl-8b"].tiny(), CPU, torch.float32)
    return OscarVLPipeline(model, processor=processor, policy="bf16")


def test_recorded_passes_repeat_and_join(pipe: OscarVLPipeline) -> None:
    pictures = [noise(64, 96, seed) for seed in range(3)]
    with pipe.chat() as chat, recorded(pipe.model) as calls:
        answers = [
            chat.ask("What is it?", images=pictures[:1], max_new_tokens=3),
            chat.ask("And this?", images=pictures[1:], max_new_tokens=2),
        ]
        tokens = chat.memory.tokens
    prompts = calls
    calls = with_steps(prompts, [answer.token_ids for answer in answers])
    assert [call.tokens for call in calls][:3] == [answers[0].prompt_tokens, 1, 1]
    assert [call.tokens for call in prompts] == [answer.prompt_tokens for answer in answers]
    assert sum(call.tokens for call in calls) == sum(tokens.values())
    for cache in (OscarCache("bf16"), DynamicCache()):
        seconds, again = replay(pipe.model, calls, cache)
        assert len(seconds) == len(calls) == len(again)
        assert difference(again[0], prompts[0]) < 1e-5
        assert difference(again[3], prompts[1]) < 1e-5
        said = [int(call.logits.argmax()) for call in again]
        assert said[:3] == answers[0].token_ids and said[3:] == answers[1].token_ids
    _, [whole] = replay(pipe.model, [joined(pipe.family, calls)], DynamicCache())
    assert int(whole.logits.argmax()) == answers[1].token_ids[-1]
    _, [whole] = replay(pipe.model, [joined(pipe.family, calls[:4])], DynamicCache())
    assert difference(whole, prompts[1]) < 1e-5
    assert difference(prompts[0], prompts[1]) > 0.1, "logits depend on the conversation"


def test_what_the_allocator_says(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"requested_bytes.all.current": 1800, "allocated_bytes.all.current": 2500}
    peak = {"requested_bytes.all.peak": 5000}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: now | peak)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    before = {"requested": 1000, "allocated": 1500, "peak": 0}
    inputs = torch.zeros(50)
    elsewhere = torch.zeros(7, device="meta")
    shown = {"a": inputs, "b": inputs[:2], "c": elsewhere}
    calls = [Call(Prompt(shown, inputs, inputs, inputs), inputs)] * 2
    found = held(before, allocated(torch.device("cuda")), calls, CPU)
    assert found == {"requested": 600, "allocated": 800, "activations": 3400}
    assert held({}, allocated(CPU), calls, CPU) == {}


def test_a_model_that_fails_does_not_take_the_others_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(name: str, device: torch.device, *, tiny: bool) -> list:
        if name == "qwen3-vl-8b":
            raise MemoryError("none left")
        return []

    monkeypatch.setattr(full_size, "measure", broken)
    assert full_size.main(["--tiny", "--out", str(tmp_path)]) == 1
    [path] = tmp_path.iterdir()
    extra = Record.load(path).extra
    assert extra["failures"] == {"qwen3-vl-8b": "MemoryError: none left"}
    assert list(extra["seconds"]) == list(RELEASED)
    assert "FAILED qwen3-vl-8b" in capsys.readouterr().out


def test_rows_of_other_models_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_size, "_tables", lambda rows: None)
    for number, names in enumerate(("qwen3-vl-8b,llava-1.6-vicuna-7b", "qwen3-vl-8b")):
        row = {"number": number}
        monkeypatch.setattr(
            full_size, "measure", lambda name, *_, row=row, **__: [row | {"model": name}]
        )
        add = ["--add"] if number else []
        assert full_size.main(["--tiny", "--models", names, "--out", str(tmp_path), *add]) == 0
    [path] = tmp_path.iterdir()
    record = Record.load(path)
    assert {row["model"]: row["number"] for row in record.rows} == {
        "llava-1.6-vicuna-7b": 0,
        "qwen3-vl-8b": 1,
    }
    assert set(record.extra["seconds"]) == {"llava-1.6-vicuna-7b", "qwen3-vl-8b"}


def test_bad_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert full_size.main(["--tiny", "--models", "gpt-5,qwen3-vl-8b"]) == 2
    assert "no such model: gpt-5; choose from llava" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_full_size_needs_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    assert full_size.main([]) == 2
    assert "CUDA" in capsys.readouterr().err
