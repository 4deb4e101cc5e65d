"""Reasoning and text of a thinking model's answer are separated while it is generated."""

from typing import Any

import pytest
import torch

from oscar_mm import OscarCache
from oscar_mm.engine.answer import Answer, AnswerStream, Reasoning, ReasoningSpan
from oscar_mm.engine.output_parsers.output_parser import OutputContext
from oscar_mm.engine.output_processor import OutputProcessor
from oscar_mm.engine.sampling import Sampling
from oscar_mm.engine.think_tokens import ThinkTokens
from tests.tiny import qwen_tokenizer
from tests.tiny_qwen3_vl import THINK

OPENED = "<|im_start|>assistant\n<think>\n"


@pytest.fixture(scope="module")
def tokenizer():
    made = qwen_tokenizer(400)
    made.add_tokens(list(THINK))
    return made


@pytest.fixture(scope="module")
def thinks(tokenizer) -> ThinkTokens:
    return ThinkTokens.of(tokenizer)


def ids(tokenizer, text: str) -> torch.Tensor:
    return torch.tensor(tokenizer(text)["input_ids"], dtype=torch.long)


def written(tokenizer, said: str, prompt: str = OPENED, **how) -> tuple[OutputProcessor, list[str]]:
    thinks = ThinkTokens.of(tokenizer)
    context = OutputContext(tokenizer, Sampling(**how), thinks, ids(tokenizer, prompt))
    writer = OutputProcessor(context, 0.0)
    pieces = []
    for token in ids(tokenizer, said)[: how.get("max_new_tokens")].tolist():
        if not writer.stopped:
            pieces += writer.push(token, 0.0)
    pieces += writer.finish()
    return writer, pieces


def answer(writer: OutputProcessor) -> Answer:
    return writer.answer(OscarCache("bf16").memory(), 7)


def joined(pieces: list[str], kind: type[str]) -> str:
    return "".join(piece for piece in pieces if piece and type(piece) is kind)


def test_think_tokens(tokenizer, thinks) -> None:
    assert ThinkTokens.of(qwen_tokenizer(400)) is None
    assert thinks.opened(ids(tokenizer, "Why?<|im_end|>\n" + OPENED)) == 2
    assert thinks.opened(ids(tokenizer, "<|im_start|>assistant\n")) == 0
    assert thinks.opened(ids(tokenizer, OPENED + "\n</think>\n\n")) == 0
    assert thinks.opened(ids(tokenizer, "<think>" + "Say what was on the sign. " * 9)) == 0


@pytest.mark.parametrize("prompt", [OPENED, "<|im_start|>assistant\n"])
def test_reasoning_and_text_are_apart(tokenizer, prompt: str) -> None:
    """Covers reasoning opened by the template and by the model."""
    begun = "" if prompt == OPENED else "<think>\n"
    said = f"{begun}\nIt is a sign.\n\nOr not?\n</think>\n\nThe sign\n says:\n</think>"
    writer, pieces = written(tokenizer, said, prompt)
    whole = answer(writer)
    assert whole.reasoning == "It is a sign.\n\nOr not?" == joined(pieces, Reasoning)
    assert whole.text == "The sign\n says:\n</think>" == joined(pieces, str) == writer.text
    assert whole.token_ids == ids(tokenizer, said).tolist()
    assert whole.finish_reason == "stop"
    opened = 2 if prompt == OPENED else 0
    text = len(ids(tokenizer, whole.text))
    assert writer.reasoning_span == ReasoningSpan(
        whole.reasoning, opened, len(whole.token_ids) - text
    )


@pytest.mark.parametrize("count", [2, 3, 7, 100])
@pytest.mark.parametrize("how", [{}, {"stop": "cat"}, {"min_tokens": 12, "stop": "cat"}])
def test_tokens_that_come_together(tokenizer, count: int, how: dict[str, Any]) -> None:
    said = "A sign.\n\nOr not?\n</think>\n\nThe sign\n says: \U0001f642 and no more."
    expected, alone = written(tokenizer, said, **how)
    thinks, prompt = ThinkTokens.of(tokenizer), ids(tokenizer, OPENED)
    writer = OutputProcessor(OutputContext(tokenizer, Sampling(**how), thinks, prompt), 0.0)
    sampled = [(token, float(at)) for at, token in enumerate(ids(tokenizer, said).tolist(), 1)]
    pieces = []
    for start in range(0, len(sampled), count):
        pieces += writer.push_all(sampled[start : start + count])
    pieces += writer.finish()
    for kind in (Reasoning, str):
        assert joined(pieces, kind) == joined(alone, kind) != ""
    one, other = answer(writer), answer(expected)
    assert (one.text, one.reasoning, one.token_ids) == (
        other.text,
        other.reasoning,
        other.token_ids,
    )
    assert writer.reasoning_span == expected.reasoning_span
    assert one.timings.prefill_s == 1 and one.timings.decode_s == len(sampled) - 1


def test_reasoning_that_comes_together_is_one_piece(tokenizer) -> None:
    context = OutputContext(
        tokenizer, Sampling(), ThinkTokens.of(tokenizer), ids(tokenizer, OPENED)
    )
    writer = OutputProcessor(context, 0.0)
    said = ids(tokenizer, "A sign.\n</think>\nA sign.").tolist()
    pieces = writer.push_all([(token, 0.0) for token in said])
    assert [piece for piece in pieces if piece] == ["A sign.", "A", " sign."]
    assert writer.reasoning_span == written(tokenizer, "A sign.\n</think>\n")[0].reasoning_span


def test_a_stop_text_ends_the_text_only(tokenizer) -> None:
    said = "A sign.\n\nIt says so.\n</think>\n\nThe sign.\n\nIt is"
    for stop, text in (("sign", "The "), ("\n\n", "The sign.")):
        whole = answer(written(tokenizer, said, stop=stop)[0])
        assert (whole.reasoning, whole.text) == ("A sign.\n\nIt says so.", text)
        assert whole.finish_reason == "stop"


def test_the_min_length_counts_the_reasoning(tokenizer) -> None:
    said = "A sign.\n</think>\n\nThe sign. The sign"
    before = len(ids(tokenizer, "A sign.\n</think>\n\nThe sign"))
    for least, text in ((before - 1, "The "), (before, "The sign. The ")):
        assert answer(written(tokenizer, said, stop="sign", min_tokens=least)[0]).text == text


def test_reasoning_that_was_cut(tokenizer) -> None:
    said = "It is a sign.\n</think>\n\nThe sign"
    count = len(ids(tokenizer, "It is a sign."))
    writer, pieces = written(tokenizer, said, max_new_tokens=count)
    whole = answer(writer)
    assert (whole.text, whole.reasoning) == ("", "It is a sign.")
    assert whole.finish_reason == "length" and joined(pieces, str) == ""
    whole = answer(written(tokenizer, said, max_new_tokens=count + 3)[0])
    assert (whole.text, whole.reasoning, whole.finish_reason) == ("", "It is a sign.", "length")
    silent = answer(written(tokenizer, "It is.\n</think>\n\n")[0])
    assert (silent.text, silent.reasoning, silent.finish_reason) == ("", "It is.", "stop")


def test_others_do_not_reason(tokenizer) -> None:
    said = "The <think> sign </think> says"
    writer, pieces = written(tokenizer, said, "<|im_start|>assistant\n")
    assert writer.reasoning_span is None and answer(writer).reasoning is None
    assert answer(writer).text == said == joined(pieces, str)


def test_a_stream_gives_text_alone_or_all(tokenizer) -> None:
    writer, pieces = written(tokenizer, "A sign.\n</think>\n\nIt says so.")
    whole = answer(writer)
    stream = AnswerStream(iter([*pieces, whole]))
    assert "".join(stream) == "It says so." and stream.result is whole
    stream = AnswerStream(iter([*pieces, whole]))
    all_of_them = list(stream.with_reasoning())
    assert joined(all_of_them, Reasoning) == "A sign." and "" not in all_of_them
    assert joined(all_of_them, str) == "It says so." and stream.result is whole
