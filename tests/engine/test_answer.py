"""Answers from tokens; their streams have no empty pieces, and end with the answer."""

import time
from collections.abc import Iterator

import pytest

from oscar_mm import OscarCache
from oscar_mm.engine.answer import Answer, AnswerStream, Timings
from oscar_mm.engine.output_parsers.output_parser import OutputContext
from oscar_mm.engine.output_processor import OutputProcessor
from oscar_mm.engine.sampling import Sampling
from tests.tiny import qwen_tokenizer

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


@pytest.fixture(scope="module")
def tokenizer():
    return qwen_tokenizer(400)


def written(tokenizer, text: str, sampling: Sampling, start: float):
    writer, pieces = OutputProcessor(OutputContext(tokenizer, sampling), start), []
    for token in tokenizer(text)["input_ids"]:
        if not writer.stopped:
            pieces += writer.push(token, time.perf_counter())
    pieces += writer.finish()
    answer = writer.answer(OscarCache("bf16").memory(), 7)
    assert "".join(pieces) == answer.text and answer.token_ids == writer.token_ids
    return answer


def test_an_answer(tokenizer) -> None:
    start = time.perf_counter() - 5
    answer = written(tokenizer, "What is written on the sign?", Sampling(), start)
    assert answer.text == "What is written on the sign?" and answer.finish_reason == "stop"
    assert answer.prompt_tokens == 7 and answer.memory.kv_bytes == 0
    timings = answer.timings
    assert 5 <= timings.prefill_s < 10 and timings.decode_s > 0
    assert timings.tokens_per_s == pytest.approx((len(answer.token_ids) - 1) / timings.decode_s)


def test_no_stop_text_before_the_min_length(tokenizer) -> None:
    text, start = "a sign, a sign, a sign.", time.perf_counter()
    first, second = (len(tokenizer(text[:end])["input_ids"]) for end in (6, 14))
    for least, expected in ((0, "a"), (first - 1, "a"), (first, "a sign, a"), (second, text[:17])):
        sampling = Sampling(stop=" sign", min_tokens=least)
        assert written(tokenizer, text, sampling, start).text == expected
    spans = Sampling(stop="a sign, a sign", min_tokens=first)
    assert written(tokenizer, text, spans, start).text == text[:8], "what comes before is no part"


def test_why_it_ended(tokenizer) -> None:
    text, start = "What is written on the sign?", time.perf_counter()
    count = len(tokenizer(text)["input_ids"])
    assert written(tokenizer, text, Sampling(max_new_tokens=count), start).finish_reason == "length"
    stopped = written(tokenizer, text, Sampling(max_new_tokens=count, stop=" on"), start)
    assert (stopped.text, stopped.finish_reason) == ("What is written", "stop")
    kept = Sampling(max_new_tokens=count, stop=["sign", " on"], include_stop_str_in_output=True)
    assert written(tokenizer, text, kept, start).text == "What is written on"
    empty = written(tokenizer, "", Sampling(), start)
    assert (empty.text, empty.token_ids, empty.finish_reason) == ("", [], "stop")
    assert empty.timings.decode_s == empty.timings.tokens_per_s == 0
