"""A parser is one class and an entry in the registry: here two that the package does not have."""

import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, Self

import pytest

from oscar_mm.engine.answer import AnswerStream, Reasoning
from oscar_mm.engine.message import first_turn
from oscar_mm.engine.output_parsers import registry
from oscar_mm.engine.output_parsers.output_parser import OutputContext, OutputParser, Part
from oscar_mm.engine.output_parsers.reasoning import ReasoningParser
from oscar_mm.engine.output_parsers.text_decoder import TextDecoder
from oscar_mm.engine.output_parsers.tool_calls import ToolCalls
from oscar_mm.engine.output_processor import OutputProcessor
from oscar_mm.engine.request import Request
from oscar_mm.engine.sampling import Sampling
from oscar_mm.engine.think_tokens import ThinkTokens
from oscar_mm.tool_parsers.calls import ToolCallDelta
from oscar_mm.tool_parsers.definitions import read_definitions
from oscar_mm.tool_parsers.offer import ToolOffer
from oscar_mm.tool_parsers.reader import Reader, Reading
from oscar_mm.tool_parsers.registry import FORMATS
from tests.thinking import ids_of, saying

OPENING, CLOSING = "Here is my thought process:", "Here is my response:"
CALL = '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>'
TOOLS = ToolOffer(read_definitions([{"name": "find"}]), FORMATS["hermes"])


class Thoughts(OutputParser):
    """Reasoning between two sentences, as Granite 3 writes it: its tokenizer has no marks."""

    @classmethod
    def of(cls, context: OutputContext) -> Self:
        return cls()

    def __init__(self) -> None:
        self._reader, self._reading = Reader(), self._read()
        self._parts: list[Part] = []

    def push(self, part: str) -> Sequence[Part]:
        self._reader.feed(part)
        return self._advance()

    def finish(self) -> Sequence[Part]:
        self._reader.ended = True
        return self._advance()

    def _advance(self) -> Sequence[Part]:
        self._parts.clear()
        next(self._reading, None)
        return [*self._parts]

    def _read(self) -> Reading[None]:
        if (yield from self._reader.literal(OPENING)):
            self._parts.append(Reasoning())
            yield from self._reader.until([CLOSING], lambda one: self._parts.append(Reasoning(one)))
            yield from self._reader.literal(CLOSING)
            self._parts.append(Reasoning())  # Counts the last mark's tokens as reasoning.
        yield from self._reader.run(re.compile("(?s:.*)"), self._parts.append)


class Source(str):
    """Reference to a source, which stays part of the text."""


class Sources(OutputParser):
    """References such as [3]."""

    @classmethod
    def of(cls, context: OutputContext) -> Self:
        return cls()

    def __init__(self) -> None:
        self._held = ""

    def push(self, part: str) -> Sequence[Part]:
        *done, last = re.split(r"(\[\d\])", self._held + part)
        self._held = last[last.find("[") :] if "[" in last[-2:] else ""
        whole = last[: len(last) - len(self._held)]
        return [Source(one) if one[:1] == "[" else one for one in (*done, whole) if one]

    def finish(self) -> Sequence[Part]:
        return [self._held]


@pytest.fixture
def chain(monkeypatch) -> Iterator[list[type[OutputParser]]]:
    monkeypatch.setattr(registry, "PARSERS", chain := [*registry.PARSERS])
    return chain


def request(pipe: Any, said: str, tools: ToolOffer | None = None, **how: Any) -> Request:
    prompt = pipe.read_request(first_turn("Why?"), 128)
    sampling = Sampling(max_new_tokens=len(ids_of(pipe, said)), **how)
    cache, start = pipe.new_cache(), time.perf_counter()
    return Request(pipe.engine, prompt, cache, sampling, start, tools=tools)


def joined(pieces: Sequence[Any], kind: type[str]) -> str:
    return "".join(piece for piece in pieces if type(piece) is kind)


def test_the_chain_has_only_what_an_answer_needs(plain) -> None:
    tokenizer = plain.processor.tokenizer
    context = OutputContext(tokenizer, Sampling())
    assert [type(one) for one in registry.parsers_of(context)] == [TextDecoder]
    context = OutputContext(tokenizer, Sampling(), thinks=ThinkTokens(1, 2), tools=TOOLS)
    kinds = [type(one) for one in registry.parsers_of(context)]
    assert kinds == [ReasoningParser, TextDecoder, ToolCalls] == registry.PARSERS


def test_reasoning_of_another_model(plain, chain) -> None:
    thought = f" I call {CALL} or not.\n"
    said = f"{OPENING}{thought}{CLOSING} I look.\n{CALL}"
    with saying(plain, ids_of(plain, said)):
        chain.insert(chain.index(ToolCalls), Thoughts)
        running_request = request(plain, said, TOOLS)
        pieces = list(running_request)
    answer = running_request.answer()
    assert joined(pieces, Reasoning) == answer.reasoning == thought
    assert joined(pieces, str) == answer.text == " I look."
    assert [call.name for call in answer.tool_calls] == ["find"]
    assert sum(isinstance(piece, ToolCallDelta) and piece.name == "find" for piece in pieces) == 1
    before = len(ids_of(plain, said.split(CLOSING)[0] + CLOSING))
    assert 0 <= answer.reasoning_tokens - before <= 1  # A token may have the end and a space.
    stream = AnswerStream(iter([*pieces, answer]))
    assert "".join(stream) == " I look." and stream.result is answer


@pytest.mark.parametrize("said", ["Here is my answer.", f"So: {OPENING} no.", f"{OPENING} not yet"])
def test_no_reasoning_or_only_that(plain, chain, said: str) -> None:
    reasons = said.startswith(OPENING)
    chain.append(Thoughts)
    with saying(plain, ids_of(plain, said)):
        running_request = request(plain, said)
        list(running_request)
    answer = running_request.answer()
    assert (answer.text, answer.reasoning) == (("", " not yet") if reasons else (said, None))


def test_pieces_of_another_kind(plain, chain) -> None:
    said = f"</think> It says [1] so [2][3], a[4].\n{CALL} [5"
    chain.append(Sources)
    context = OutputContext(plain.processor.tokenizer, Sampling(stop="]."), tools=TOOLS)
    writer, pieces = OutputProcessor(context, 0.0), []
    for token in ids_of(plain, said):
        if not writer.stopped:
            pieces += writer.push(token, time.perf_counter())
    pieces += writer.finish()
    assert [piece for piece in pieces if isinstance(piece, Source)] == ["[1]", "[2]", "[3]"]
    assert writer.stopped and writer.text == "</think> It says [1] so [2][3], a[4"
    assert "".join(pieces) == writer.text
