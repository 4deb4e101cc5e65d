"""Engine: one prefill of a recording, rows in batches, and what goes wrong stays with its row."""

import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from PIL import Image

from oscar_mm import KVPolicy
from oscar_mm.apps.audio_qa import engine as engine_module
from oscar_mm.apps.audio_qa.engine import AnswerSettings, Engine, Worker, WorkerSettings
from oscar_mm.apps.audio_qa.rows import Row, by_recording, read_rows
from oscar_mm.errors import MemoryBusy
from oscar_mm.fast_decode.graph_runner import GraphRunner
from oscar_mm.media import MediaLimits
from oscar_mm.modality import Modality
from tests.apps.audio_qa.conftest import CHOICES, assert_same, questions, write_lines
from tests.prompts import noise


def rows_of(folder: Path, records: list[dict[str, Any]]) -> list[Row]:
    return read_rows(write_lines(folder / "questions.jsonl", records))


def answered(engine: Engine, rows: list[Row], groups: Any = None) -> dict[str, dict[str, Any]]:
    results = list(engine.run(by_recording(rows) if groups is None else groups))
    assert len({result["id"] for result in results}) == len(results) == len(rows)
    return {result["id"]: result for result in results}


@contextmanager
def passes(pipe: Any) -> Iterator[tuple[list[int], list[int]]]:
    """Recordings of each pass of the audio tower, and rows of each decode step."""
    media: list[int] = []
    rows: list[int] = []
    step = GraphRunner.__call__

    def stepped(
        steps: GraphRunner, tokens: torch.Tensor, ended: torch.Tensor, *more: Any
    ) -> torch.Tensor:
        rows.append(int((~ended).sum()))
        return step(steps, tokens, ended, *more)

    tower = pipe.model.get_encoder(
        modality="audio" if Modality.AUDIO in pipe.family.reads else "image"
    )
    hook = tower.register_forward_pre_hook(lambda *_: media.append(1))
    with patch.object(GraphRunner, "__call__", stepped):
        yield media, rows
    hook.remove()


def test_a_recording_is_read_once(worker: Worker, recordings: Path) -> None:
    pipe, rows = worker._pipe, rows_of(recordings, questions(3))
    with passes(pipe) as (shared, in_batches):
        together = answered(Engine(pipe, worker._engine.settings, 4), rows)
    with passes(pipe) as (alone, one_by_one):
        apart = answered(Engine(pipe, worker._engine.settings, 1), rows, [[row] for row in rows])
    # The same answers, whoever stands beside them.
    assert_same(together, apart)
    assert not any(result["error"] for result in together.values())
    assert (len(shared), len(alone)) == (3, 9)
    assert max(in_batches) > 2 and max(one_by_one) == 1
    assert len(in_batches) < len(one_by_one) / 2
    assert pipe.store.memory().used_bytes == 0
    one = together["2-0"]
    assert one["finish_reason"] in ("stop", "length") and one["choice"] is None
    assert one["kv_bytes"] > 0 and one["tokens"] > 13 * 1.8
    assert together["2-2"]["choice"] == CHOICES.index(together["2-2"]["answer"])
    assert len(together["2-2"]["scores"]) == 3 and together["2-2"]["correct"] in (True, False)


def test_a_question_that_is_too_long_is_its_row_s_alone(worker: Worker, recordings: Path) -> None:
    records = questions(1)[:2]
    records[0]["question"] = "why " * 70_000
    results = answered(
        Engine(worker._pipe, worker._engine.settings, 4), rows_of(recordings, records)
    )
    first, second = (results[record["id"]] for record in records)
    assert "over the context" in first["error"] and second["error"] is None


def test_the_next_recording_is_decoded_meanwhile(worker, recordings, monkeypatch) -> None:
    reader, read = worker._pipe.media_reader, []
    right = reader.read

    def read_media(parts: Any, **how: Any) -> Any:
        read.append((parts[0].source, threading.get_ident()))
        return right(parts, **how)

    monkeypatch.setattr(reader, "read", read_media)
    rows = rows_of(recordings, questions(4, 1))
    results = Engine(worker._pipe, worker._engine.settings, 1).run(by_recording(rows))
    next(results)
    deadline = time.monotonic() + 10
    while len(read) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [Path(name).name for name, _ in read] == ["0.wav", "1.wav", "2.wav"]
    assert threading.get_ident() not in [thread for _, thread in read]
    results.close()
    assert len(read) < 4


@pytest.mark.slow
def test_free_answers_are_those_of_the_pipeline(worker: Worker, recordings: Path) -> None:
    rows = rows_of(recordings, questions(2, 2))
    exact = Worker(replace_policy(worker, "bf16"))
    for row, result in zip(rows, answered(exact._engine, rows).values(), strict=True):
        alone = exact._pipe(prompt=row.question, audio=list(row.audio), max_new_tokens=5)
        assert result["answer"] == alone.text
        assert result["tokens"] == alone.prompt_tokens + len(alone.token_ids)


def replace_policy(worker: Worker, policy: str) -> Any:
    how = replace(worker._engine.settings, policy=KVPolicy.preset(policy))
    return replace(worker.plan, settings=how)


def test_what_goes_wrong_stays_with_its_row(worker: Worker, recordings: Path) -> None:
    (recordings / "broken.wav").write_bytes(b"RIFF\xff\xff\xff\x00WAVEfmt ")
    (recordings / "notes.flac").write_text("no sound at all")
    bad = {
        "missing": ({"audio": "gone.wav"}, "gone.wav: no such file"),
        "broken": ({"audio": "broken.wav"}, "broken.wav: has 16 of"),
        "no sound": ({"audio": ["0.wav", "notes.flac"]}, "notes.flac: "),
        "overlong": ({"audio": "5.wav"}, "longer than the limit of 2.5 s"),
        "no question": ({"question": ""}, "question must be non-empty text"),
        "control": ({"question": "<|im_end|>?"}, "control token"),
        "choices": ({"choices": ["a", "<|im_end|>"]}, "control token"),
        "answer": ({"choices": ["a", "b"], "answer": "c"}, "not one of the choices"),
        "address": ({"audio": "https://example.org/a.wav"}, "remote media are disabled"),
        "nothing": ({"videos": "gone.mp4", "audio": None}, "gone.mp4: no such file"),
    }
    records = [{"id": name, "question": "Who?", "audio": "0.wav"} | bad[name][0] for name in bad]
    rows = rows_of(recordings, [*questions(1), *records])
    pipe = worker._pipe
    reader = pipe.media_reader
    before, reader.limits = reader.limits, MediaLimits(max_audio_seconds=2.5)
    try:
        found = answered(Engine(pipe, worker._engine.settings, 4), rows)
    finally:
        reader.limits = before
    for name, (_, expected) in bad.items():
        assert expected in found[name]["error"], found[name]
        assert found[name]["answer"] is None and found[name]["kv_bytes"] == 0
    assert [found[f"0-{place}"]["error"] for place in range(3)] == [None] * 3
    assert pipe.store.memory().used_bytes == 0


def choice_rows(recordings: Path) -> list[Row]:
    """Two rows with choices about each of two recordings, and others without."""
    more = [
        {"id": f"{place}-3", "question": "Which?", "audio": f"{place}.wav", "choices": CHOICES}
        for place in range(2)
    ]
    return rows_of(recordings, [*questions(2), *more])


@pytest.mark.parametrize("most", [0, 1])
def test_choices_that_fail_together_are_tried_one_by_one(
    worker, recordings, monkeypatch, most: int
) -> None:
    rows = choice_rows(recordings)
    expected = answered(Engine(worker._pipe, worker._engine.settings, 4), rows)
    right = engine_module.choose

    def choose(pipe: Any, asked: list[Any]) -> Any:
        if len(asked) > most:
            raise RuntimeError("too many\nrows")
        return right(pipe, asked)

    monkeypatch.setattr(engine_module, "choose", choose)
    found = answered(Engine(worker._pipe, worker._engine.settings, 4), rows)
    for row_id in ("0-2", "0-3", "1-2", "1-3") if not most else ():
        assert found.pop(row_id)["error"] == "RuntimeError: too many rows"
        expected.pop(row_id)
    assert_same(found, expected)


def test_more_rows_about_a_recording_than_run_at_once(worker: Worker, recordings: Path) -> None:
    rows = rows_of(
        recordings,
        [{"id": f"{i}", "question": f"Who is {i}?", "audio": "0.wav"} for i in range(5)],
    )
    expected = answered(Engine(worker._pipe, worker._engine.settings, 8), rows)
    # All that run end at the same step, before the rest begins.
    for most in (1, 2):
        with passes(worker._pipe) as (media, _):
            found = answered(Engine(worker._pipe, worker._engine.settings, most), rows)
        assert_same(found, expected)
        assert len(media) == 1
    assert not any(result["error"] for result in expected.values())
    assert worker._pipe.store.memory().used_bytes == 0


def test_choices_without_memory_for_two(worker, recordings, monkeypatch) -> None:
    rows = [row for row in choice_rows(recordings) if row.choices]
    expected = answered(Engine(worker._pipe, worker._engine.settings, 4), rows)

    class Reservation:
        pass

    reservations: list[weakref.ref[Reservation]] = []

    def reserve(*_: Any) -> Reservation:
        if any(reservation() is not None for reservation in reservations):
            raise MemoryBusy("there is room for one")
        reservation = Reservation()
        reservations.append(weakref.ref(reservation))
        return reservation

    monkeypatch.setattr(type(worker._pipe.admission), "reserve", reserve)
    found = answered(Engine(worker._pipe, worker._engine.settings, 4), rows)
    assert_same(found, expected)
    assert len(rows) == 4 and not any(result["error"] for result in found.values())


def test_budget(worker: Worker, recordings: Path) -> None:
    rows = rows_of(recordings, questions(6))
    free = Engine(worker._pipe, worker._engine.settings, 8)
    expected = answered(free, rows)
    # About what a recording and two of its rows take.
    limit = 300_000
    bounded = Worker(replace(worker.plan, kv_budget=limit))
    seen = []
    hook = bounded._pipe.model.register_forward_hook(
        lambda *_: seen.append(bounded._pipe.store.memory().used_bytes)
    )
    assert_same(answered(bounded._engine, rows), expected)
    assert 0.4 * limit < max(seen) <= limit < free.peak_bytes
    hook.remove()
    tiny = Worker(replace(worker.plan, kv_budget=13_000))
    found = answered(tiny._engine, rows)
    assert all("kv_budget is 13,000 bytes, but the" in one["error"] for one in found.values())
    assert tiny._pipe.store.memory().used_bytes == 0


def test_listed_choices_and_other_media(worker: Worker, recordings: Path) -> None:
    Image.fromarray(noise(64, 96)).save(recordings / "a.png")
    record = {"question": "What is it?", "images": "a.png", "choices": CHOICES}
    rows = rows_of(recordings, [{"id": 1} | record, {"id": 2, "question": "Why?"}])
    how = replace(worker._engine.settings, list_choices=True)
    found = answered(Engine(worker._pipe, how, 4), rows)
    assert [one["error"] for one in found.values()] == [None, None]
    assert found["1"]["answer"] in CHOICES and found["2"]["answer"]
    prompt, letters = how.prompt("Is it?", ("yes", "no"))
    assert prompt == "Is it?\nA. yes\nB. no\nAnswer with the letter." and letters == ["A", "B"]
    assert AnswerSettings(how.policy).prompt("Is it?", ("yes", "no")) == ("Is it?", ["yes", "no"])
    many = rows_of(recordings, [{"id": 1} | record | {"choices": [str(one) for one in range(27)]}])
    assert (
        "27 are more than the 26 letters" in answered(Engine(worker._pipe, how), many)["1"]["error"]
    )


@pytest.mark.daily("compact")
@pytest.mark.parametrize("policy", ["compact", "bf16"])
def test_models_that_are_balanced_by_the_prompt(policy, llava_next_folder, recordings) -> None:
    for name in "abc":
        Image.fromarray(noise(100, 120, ord(name))).save(recordings / f"{name}.png")
    records = [
        {"id": f"{name}{place}", "question": question, "images": f"{name}.png"}
        for name in "abc"
        for place, question in enumerate(("What is it?", "How many people?"))
    ]
    rows = rows_of(recordings, records)
    how = AnswerSettings(KVPolicy.preset(policy), max_new_tokens=4)
    worker = Worker(WorkerSettings(str(llava_next_folder), how, 8, device="cpu"))
    with passes(worker._pipe) as (_, rows_of_steps):
        found = answered(worker._engine, rows)
    assert not any(one["error"] for one in found.values())
    assert max(rows_of_steps) > 2
    apart = answered(Engine(worker._pipe, how, 1), rows, [[row] for row in rows])
    assert_same(found, apart)
