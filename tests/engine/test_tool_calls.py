"""Tool calls are separated from text and reasoning while an answer is generated."""

import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tokenizers import AddedToken

from oscar_mm import OscarCache
from oscar_mm.engine.answer import Answer, AnswerStream, Reasoning
from oscar_mm.engine.message import first_turn
from oscar_mm.engine.output_parsers.output_parser import OutputContext
from oscar_mm.engine.output_processor import OutputProcessor
from oscar_mm.engine.request import Request
from oscar_mm.engine.sampling import Sampling
from oscar_mm.engine.think_tokens import ThinkTokens
from oscar_mm.tool_parsers.calls import ToolCallDelta, joined_calls
from oscar_mm.tool_parsers.definitions import read_definitions
from oscar_mm.tool_parsers.offer import ToolOffer
from oscar_mm.tool_parsers.parser import Piece
from oscar_mm.tool_parsers.registry import FORMATS
from tests.thinking import ids_of, saying
from tests.tiny import qwen_tokenizer
from tests.tiny_qwen3_vl import THINK

TOOLS = read_definitions([{"name": "find"}, {"name": "stop"}])
OPENED = "<|im_start|>assistant\n<think>\n"
FIND = '<tool_call>\n{"name": "find", "arguments": {"text": "the sign"}}\n</tool_call>'
STOP = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def qwen() -> Any:
    """Tokenizer as Qwen3's, whose tags are tokens, but not special tokens."""
    made = qwen_tokenizer(400)
    made.add_tokens([*THINK, "<tool_call>", "</tool_call>"])
    return made


@pytest.fixture(scope="module")
def mistral() -> Any:
    made = qwen_tokenizer(400)
    marks = [AddedToken(mark, special=True) for mark in ("[TOOL_CALLS]", "[ARGS]")]
    made.add_tokens(marks, special_tokens=True)
    return made


def offer(name: str = "hermes", **how: Any) -> ToolOffer:
    return ToolOffer(TOOLS, FORMATS[name], **how)


def written(
    tokenizer: Any, said: str, tools: ToolOffer | None, prompt: str = "", **how: Any
) -> tuple[Answer, list[Piece]]:
    def ids(text: str) -> torch.Tensor:
        return torch.tensor(tokenizer(text)["input_ids"], dtype=torch.long)

    thinks = ThinkTokens.of(tokenizer)
    context = OutputContext(tokenizer, Sampling(**how), thinks, ids(prompt), tools)
    writer = OutputProcessor(context, 0.0)
    pieces: list[Piece] = []
    for token in ids(said)[: how.get("max_new_tokens")].tolist():
        if not writer.stopped:
            pieces += writer.push(token, time.perf_counter())
    pieces += writer.finish()
    answer = writer.answer(OscarCache("bf16").memory(), 7)
    assert told(pieces) == (answer.text, [(one.name, one.arguments) for one in answer.tool_calls])
    return answer, pieces


def told(pieces: Sequence[Piece]) -> tuple[str, list[tuple[str, str]]]:
    text = "".join(piece for piece in pieces if type(piece) is str)
    calls = joined_calls(piece for piece in pieces if isinstance(piece, ToolCallDelta))
    return text, [(call.name, call.arguments) for call in calls]


def test_text_reasoning_and_calls_are_apart(qwen) -> None:
    said = f"I find {STOP} it.\n</think>\n\nI look.\n{FIND}\n{STOP}"
    answer, pieces = written(qwen, said, offer(), OPENED)
    assert answer.reasoning == f"I find {STOP} it."
    assert "".join(piece for piece in pieces if isinstance(piece, Reasoning)) == answer.reasoning
    assert answer.text == "I look." and answer.finish_reason == "tool_calls"
    found = [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]
    assert found == [("find", {"text": "the sign"}), ("stop", {})]
    assert answer.token_ids == qwen(said)["input_ids"]


def test_without_tools_marks_are_text(qwen) -> None:
    answer, _ = written(qwen, f"So: {FIND}", None)
    assert (answer.text, answer.tool_calls) == (f"So: {FIND}", ())
    assert answer.finish_reason == "stop"


def test_an_answer_without_calls_is_as_ever(qwen) -> None:
    said = "The <tool is {not} a call.\n"
    answer, pieces = written(qwen, said, offer())
    assert answer.text == said and answer.finish_reason == "stop"
    assert all(isinstance(piece, str) for piece in pieces)


def test_marks_that_are_special_tokens(mistral) -> None:
    said = 'I look.[TOOL_CALLS]find[ARGS]{"text": "x"}<|vision_start|>[TOOL_CALLS]stop[ARGS]{}'
    answer, _ = written(mistral, said, offer("mistral_named"))
    assert answer.text == "I look."
    found = [(call.name, call.arguments) for call in answer.tool_calls]
    assert found == [("find", '{"text": "x"}'), ("stop", "{}")]
    assert written(mistral, said, None)[0].text == 'I look.find{"text": "x"}stop{}'


def test_an_answer_ends_after_its_only_call(qwen) -> None:
    for how in ({"parallel": False}, {"named": "find"}):
        answer, _ = written(qwen, f"{FIND}\n{STOP}", offer(**how))
        assert [call.name for call in answer.tool_calls] == ["find"]
        assert answer.finish_reason == "tool_calls"
        assert len(answer.token_ids) < len(qwen(FIND)["input_ids"])  # The object has ended.


def test_a_call_that_is_cut_short(qwen) -> None:
    count = len(qwen(FIND.split(" sign")[0])["input_ids"])
    answer, _ = written(qwen, FIND, offer(), max_new_tokens=count)
    assert [call.arguments for call in answer.tool_calls] == ['{"text": "the']
    assert answer.finish_reason == "length"


def test_a_stop_text_ends_a_call_too(qwen) -> None:
    answer, _ = written(qwen, FIND, offer(), stop="sign")
    assert [call.arguments for call in answer.tool_calls] == ['{"text": "the ']


def test_a_stream_gives_text_alone_or_all(qwen) -> None:
    answer, pieces = written(qwen, f"I look.\n{FIND}", offer())
    assert "".join(AnswerStream(iter([*pieces, answer]))) == "I look."
    stream = AnswerStream(iter([*pieces, answer]))
    left = list(stream.pieces())
    assert told(left) == told(pieces) and "" not in left and stream.result is answer


def test_an_answer_of_the_engine(plain) -> None:
    prompt = plain.read_request(first_turn("Why?"), 64)
    said = ids_of(plain, f"I look.\n{FIND}")
    sampling = Sampling(max_new_tokens=len(said))
    args = (plain.engine, prompt, plain.new_cache(), sampling, time.perf_counter())
    with saying(plain, said):
        running_request = Request(*args, tools=offer())
        pieces = list(running_request)
    answer = running_request.answer()
    assert told(pieces) == ("I look.", [("find", '{"text": "the sign"}')])
    assert [call.name for call in answer.tool_calls] == ["find"]
