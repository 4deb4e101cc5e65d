"""After an answer on a CPU a conversation takes no more than in 16-bit precision, however short it
is."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from oscar_mm import OscarVLPipeline
from oscar_mm.cache.memory import MemoryReport
from oscar_mm.pipelines.pipeline import Pipeline

CARDS = sorted((Path(__file__).parents[2] / "examples" / "media" / "cards").glob("*.png"))
LENGTHS = [*range(1, 60, 4), *range(60, 301, 24)]
"""Words of prompts; the template has some 6 to 12 tokens more."""
PACKS_FROM = 61
"""Tokens of one modality of which the first page takes less than they do in 16-bit precision:
sinks, window and ``min_page_tokens`` of 3 and 2 bits."""


@pytest.fixture(scope="module", params=["pocket-vl", "pocket-llava"])
def pipe(request: pytest.FixtureRequest) -> Iterator[Pipeline]:
    yield OscarVLPipeline(request.param, device="cpu")


def check(report: MemoryReport) -> None:
    """Nothing is there that no token uses; tables are all that comes on top of 16 bit."""
    tokens, tables = sum(report.tokens.values()), report.by_kind["tables"]
    assert report.by_kind["unused"] == 0
    assert report.kv_bytes - tables <= report.bf16_bytes
    # Five bytes a token, and balancing, which takes as much as a token at most.
    assert tables < report.bf16_bytes / tokens + 6 * tokens + 100
    if max(report.tokens.values()) > PACKS_FROM:
        assert report.ratio > 1


def text_of(words: int) -> str:
    return " ".join(["word"] * words)


@pytest.mark.daily("pocket-vl-1")
@pytest.mark.parametrize("pictures", [0, 1])
def test_prompts_of_1_to_300_tokens(pipe: Pipeline, pictures: int) -> None:
    for words in LENGTHS[:: 1 + 2 * pictures]:
        for most in (1, 2 + words % 30):
            report = pipe(CARDS[:pictures], text_of(words), max_new_tokens=most).memory
            check(report)
    assert sum(report.tokens.values()) > 300


@pytest.mark.daily("pocket-vl-300", "pocket-llava-1000")
@pytest.mark.parametrize(("words", "least"), [(300, 2.8), (1000, 4.4)])
def test_from_300_tokens_on_most_is_saved(pipe: Pipeline, words: int, least: float) -> None:
    report = pipe([], text_of(words), max_new_tokens=4).memory
    assert report.ratio > least


def test_turns_of_a_chat(pipe: Pipeline) -> None:
    with pipe.chat() as chat:
        for turn, words in enumerate((3, 1, 20, 60, 2)):
            answer = chat.ask(text_of(words), images=CARDS[turn : turn + 1], max_new_tokens=9)
            check(answer.memory)
            check(chat.memory)
        chat.forget(1)
        assert chat.memory.by_kind["unused"] == 0
        chat.undo()
        assert chat.memory.by_kind["unused"] == 0
        chat.tell(text_of(3), text_of(90))
        check(chat.memory)


def test_an_answer_in_a_batch_takes_nothing_from_others(pipe: Pipeline) -> None:
    """Its slots go back as far as nobody else may be at theirs."""
    with pipe.chat() as chat, pipe.chat() as other:
        expected = chat.ask(text_of(40), max_new_tokens=9).token_ids
        stream = other.stream(text_of(40), max_new_tokens=9)
        next(stream, None)
        check(pipe([], text_of(50), max_new_tokens=20).memory)
        assert stream.complete().token_ids == expected
        check(chat.memory)
        check(other.memory)
