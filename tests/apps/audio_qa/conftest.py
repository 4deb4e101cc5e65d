"""Recordings and questions about them, for a tiny Qwen3-Omni with random weights."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from oscar_mm import KVPolicy
from oscar_mm.apps.audio_qa.engine import AnswerSettings, Worker, WorkerSettings
from oscar_mm.policy import DEFAULT
from tests.prompts import tone
from tests.recordings import write_sound

QUESTIONS = ("Who speaks?", "How many people are there in all?", "Is it a dog?")
CHOICES = ["brown", "white", "two dogs"]


def write_lines(path: Path, records: Iterable[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def read_lines(path: Path) -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found = {row["id"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def assert_same(found: dict[str, dict[str, Any]], expected: dict[str, dict[str, Any]]) -> None:
    """The same rows, but for times and the rounding of scores."""
    assert found.keys() == expected.keys()
    for name, row in found.items():
        other = expected[name]
        assert row["scores"] == (other["scores"] and pytest.approx(other["scores"], abs=1e-3))
        assert row | {"seconds": 0, "scores": 0} == other | {"seconds": 0, "scores": 0}


def questions(recordings: int, asked: int = 3) -> list[dict[str, Any]]:
    """So many questions about each recording, every third with choices."""
    return [
        {
            "id": f"{number}-{place}",
            "audio": f"{number}.wav",
            "question": QUESTIONS[place % 3],
            "group": f"recording {number}",
            **({"choices": CHOICES, "answer": "white"} if place % 3 == 2 else {"answer": "x"}),
        }
        for number in range(recordings)
        for place in range(asked)
    ]


@pytest.fixture(scope="session")
def recordings(tmp_path_factory) -> Path:
    """A folder with 0.wav to 5.wav, the later the longer."""
    folder = tmp_path_factory.mktemp("recordings")
    for number in range(6):
        sound = tone(1.0 + 0.4 * number, 200.0 + 40 * number, seed=number)
        write_sound(folder / f"{number}.wav", sound, rate=16_000, layout="mono")
    return folder


@pytest.fixture(scope="session")
def plan(qwen3_omni_folder) -> WorkerSettings:
    how = AnswerSettings(KVPolicy.preset(DEFAULT), max_new_tokens=5)
    return WorkerSettings(str(qwen3_omni_folder), how, batch_size=4, device="cpu")


@pytest.fixture(scope="session")
def worker(plan) -> Worker:
    return Worker(plan)
