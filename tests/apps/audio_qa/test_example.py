"""The example file, answered by the bundled model: real sound, right answers."""

from pathlib import Path

import pytest

from oscar_mm.apps.audio_qa import audio_qa
from tests.apps.audio_qa.conftest import read_lines

EXAMPLE = Path(__file__).parents[3] / "examples" / "audio_qa.jsonl"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_answers_are_right(device: str, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    summary = audio_qa(EXAMPLE, out, "pocket-omni", device=device)
    assert (summary["rows"], summary["failures"]) == (15, {})
    assert summary["choice_accuracy"] == 1.0 and summary["exact_match"] >= 0.8
    rows = read_lines(out)
    # Ten clips are one recording, and a choice is far likelier than the others.
    assert rows["clip 3"]["answer"] == "tiger"
    scores = sorted(rows["choose 4"]["scores"])
    assert scores[-1] > -1 > -3 > scores[-2]
