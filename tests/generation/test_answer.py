"""AnswerStream: pieces without empty ones, and the answer only at the end."""

from collections.abc import Iterator

import pytest

from oscar_mm import OscarCache
from oscar_mm.generation.answer import Answer, AnswerStream, Timings

ANSWER = Answer(
    text="ab",
    token_ids=[1, 2],
    memory=OscarCache("bf16").memory(),
    timings=Timings(0.1, 0.2, 5.0),
    finish_reason="stop",
    prompt_tokens=3,
)


def test_pieces_and_result() -> None:
    stream = AnswerStream(iter(["a", "", "", "b", "", ANSWER]))
    with pytest.raises(RuntimeError, match="not complete"):
        _ = stream.result
    assert next(stream) == "a" and next(stream) == "b"
    with pytest.raises(RuntimeError, match="not complete"):
        _ = stream.result
    assert list(stream) == []
    assert stream.result is ANSWER and str(stream.result) == "ab"
    assert next(stream, None) is None


def test_empty_answer() -> None:
    stream = AnswerStream(iter(["", ANSWER]))
    assert list(stream) == [] and stream.result is ANSWER


def test_an_error_leaves_no_result() -> None:
    def pieces() -> Iterator[str]:
        yield "a"
        raise FloatingPointError("NaN")

    stream = AnswerStream(pieces())
    assert next(stream) == "a"
    with pytest.raises(FloatingPointError):
        next(stream)
    assert list(stream) == []
    with pytest.raises(RuntimeError, match="not complete"):
        _ = stream.result


def test_close_ends_the_answer() -> None:
    closed = []

    def pieces() -> Iterator[str]:
        try:
            yield from ("a", "b")
        except GeneratorExit:
            closed.append(True)
            raise

    stream = AnswerStream(pieces())
    assert next(stream) == "a"
    stream.close()
    stream.close()
    assert closed == [True] and list(stream) == []
