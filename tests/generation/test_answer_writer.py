"""An answer from tokens as they come."""

import time

import pytest

from oscar_mm import OscarCache
from oscar_mm.generation.answer import AnswerWriter
from oscar_mm.generation.sampling import Sampling
from tests.tiny import qwen_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return qwen_tokenizer(400)


def written(tokenizer, text: str, sampling: Sampling, start: float):
    writer, pieces = AnswerWriter(tokenizer, sampling, start), []
    for token in tokenizer(text)["input_ids"]:
        if not writer.stopped:
            pieces.append(writer.push(token))
    pieces.append(writer.finish())
    answer = writer.answer(OscarCache("bf16").memory(), 7)
    assert "".join(pieces) == answer.text and answer.token_ids == writer.token_ids
    return answer


def test_an_answer(tokenizer) -> None:
    start = time.perf_counter() - 5
    answer = written(tokenizer, "What is written on the sign?", Sampling(), start)
    assert answer.text == "What is written on the sign?" and answer.finish_reason == "stop"
    assert answer.prompt_tokens == 7 and answer.memory.kv_bytes == 0
    timings = answer.timings
    assert 5 <= timings.prefill_s < 6 and timings.decode_s > 0
    assert timings.tokens_per_s == pytest.approx((len(answer.token_ids) - 1) / timings.decode_s)


def test_why_it_ended(tokenizer) -> None:
    text, start = "What is written on the sign?", time.perf_counter()
    count = len(tokenizer(text)["input_ids"])
    assert written(tokenizer, text, Sampling(max_new_tokens=count), start).finish_reason == "length"
    stopped = written(tokenizer, text, Sampling(max_new_tokens=count, stop=" on"), start)
    assert (stopped.text, stopped.finish_reason) == ("What is written", "stop")
    empty = written(tokenizer, "", Sampling(), start)
    assert (empty.text, empty.token_ids, empty.finish_reason) == ("", [], "stop")
    assert empty.timings.decode_s == empty.timings.tokens_per_s == 0
