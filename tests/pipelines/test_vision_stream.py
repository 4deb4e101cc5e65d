"""Streams of one pipeline: pieces, stop texts, seeds, and two at a time."""

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest

from oscar_mm import OscarVLPipeline
from oscar_mm.engine.answer import AnswerStream
from tests.prompts import REQUESTS, Request


@pytest.fixture(scope="module")
def pipe(qwen3_vl_folder) -> OscarVLPipeline:
    pipe = OscarVLPipeline(qwen3_vl_folder, device="cpu")
    pipe.model.generation_config.eos_token_id = 1 << 20
    return pipe


def stream(pipe: OscarVLPipeline, request: Request, **options) -> AnswerStream:
    return pipe.stream(list(request.images), request.prompt, videos=list(request.videos), **options)


@pytest.mark.daily("text", "image and video")
@pytest.mark.parametrize("name", REQUESTS)
def test_pieces_are_the_text(pipe, name: str) -> None:
    one = stream(pipe, REQUESTS[name], max_new_tokens=40)
    pieces = list(one)
    assert len(pieces) > 10 and all(pieces)
    whole = REQUESTS[name].ask(pipe, max_new_tokens=40)
    assert "".join(pieces) == one.result.text == whole.text
    assert one.result.token_ids == whole.token_ids
    assert whole.text == pipe.processor.decode(whole.token_ids, skip_special_tokens=True)
    assert json.loads(json.dumps(one.result.memory.to_dict()))["tokens"]
    assert set(asdict(one.result.timings)) == {"prefill_s", "decode_s", "tokens_per_s"}


def test_result_only_at_the_end(pipe) -> None:
    one = stream(pipe, REQUESTS["text"], max_new_tokens=12)
    with pytest.raises(RuntimeError, match="not complete"):
        _ = one.result
    next(one)
    with pytest.raises(RuntimeError, match="not complete"):
        _ = one.result
    for _ in one:
        pass
    assert len(one.result.token_ids) == 12


def test_first_piece_comes_before_the_last_token(pipe) -> None:
    forwards = []
    hook = pipe.model.register_forward_hook(lambda *_: forwards.append(1))
    try:
        one = stream(pipe, REQUESTS["image"], max_new_tokens=30)
        assert not forwards
        next(one)
        assert len(forwards) < 6
        for _ in one:
            pass
        # The prompt gives the first token, and nothing is done with the last.
        assert len(forwards) == 30
    finally:
        hook.remove()


def test_breaking_off_leaves_the_pipeline_as_it_was(pipe) -> None:
    request = REQUESTS["image and video"]
    expected = request.ask(pipe, max_new_tokens=16).text
    for count in range(3):
        for _ in itertools.islice(stream(pipe, request, max_new_tokens=16), count):
            pass
        kept = stream(pipe, REQUESTS["two images"], max_new_tokens=16)
        next(kept)
        assert request.ask(pipe, max_new_tokens=16).text == expected


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 20])
def test_two_streams_at_a_time(pipe, chunk: int | None) -> None:
    """Nothing of a conversation is on the model, as transformers' rope_deltas are."""
    pipe = OscarVLPipeline(pipe.model, processor=pipe.processor, prefill_chunk=chunk)
    requests = list(REQUESTS.values())
    alone = [request.ask(pipe, max_new_tokens=12).token_ids for request in requests]
    streams = [stream(pipe, request, max_new_tokens=12) for request in requests]
    for _ in itertools.zip_longest(*streams):
        pass
    assert [one.result.token_ids for one in streams] == alone
    # Begun in one order, ended in the other.
    streams = [stream(pipe, request, max_new_tokens=12) for request in requests]
    for one in streams:
        next(one)
    for one in reversed(streams):
        for _ in one:
            pass
    assert [one.result.token_ids for one in streams] == alone


@pytest.mark.daily("None")
@pytest.mark.parametrize("chunk", [None, 20])
def test_threads(pipe, chunk: int | None) -> None:
    pipe = OscarVLPipeline(pipe.model, processor=pipe.processor, prefill_chunk=chunk)
    requests = [*REQUESTS.values()] * 3
    alone = [request.ask(pipe, max_new_tokens=3).token_ids for request in requests]
    with ThreadPoolExecutor(4) as threads:
        answers = threads.map(lambda request: request.ask(pipe, max_new_tokens=3), requests)
        assert [answer.token_ids for answer in answers] == alone


def test_plain_transformers_in_between(pipe) -> None:
    one = stream(pipe, REQUESTS["two images"], max_new_tokens=20)
    next(one)
    text = pipe.processor.tokenizer(["Hello you"], return_tensors="pt")
    pipe.model.generate(**text, max_new_tokens=3)
    for _ in one:
        pass
    expected = REQUESTS["two images"].ask(pipe, max_new_tokens=20).token_ids
    assert one.result.token_ids == expected


def test_stop(pipe) -> None:
    request = REQUESTS["image"]
    whole = request.ask(pipe, max_new_tokens=40)
    middle = len(whole.text) // 2
    # Five characters of this answer lie in more than one token.
    across = whole.text[middle : middle + 5]
    for stop in (across, [across, "absent"], ("absent", across)):
        one = stream(pipe, request, max_new_tokens=40, stop=stop)
        pieces = list(one)
        expected = whole.text[: whole.text.index(across)]
        assert "".join(pieces) == one.result.text == expected
        assert one.result.finish_reason == "stop"
        count = len(one.result.token_ids)
        assert one.result.token_ids == whole.token_ids[:count] and count < 40
    at_once = request.ask(pipe, max_new_tokens=40, stop=whole.text[0])
    assert (at_once.text, at_once.finish_reason) == ("", "stop")
    assert len(at_once.token_ids) <= 2
    absent = request.ask(pipe, max_new_tokens=40, stop="absent")
    assert (absent.text, absent.finish_reason) == (whole.text, "length")


def test_stop_in_the_last_token(pipe) -> None:
    request = REQUESTS["text"]
    tokens = request.ask(pipe, max_new_tokens=12)
    last = tokens.text[-1]
    if tokens.text.index(last) == len(tokens.text) - 1:
        assert request.ask(pipe, max_new_tokens=12, stop=last).finish_reason == "stop"
    shorter = request.ask(pipe, max_new_tokens=12, stop=tokens.text)
    assert (shorter.text, shorter.finish_reason) == ("", "stop")
    assert shorter.token_ids == tokens.token_ids


def test_one_token(pipe) -> None:
    one = stream(pipe, REQUESTS["image"], max_new_tokens=1)
    assert len(list(one)) <= 1
    answer = one.result
    assert len(answer.token_ids) == 1 and answer.finish_reason == "length"
    assert answer.timings.decode_s == 0 and answer.timings.tokens_per_s == 0
    assert answer.timings.prefill_s > 0


@pytest.mark.slow
def test_seeds(pipe) -> None:
    request = REQUESTS["image"]
    how = {"max_new_tokens": 24, "temperature": 1.0}
    first = request.ask(pipe, seed=1, **how)
    assert request.ask(pipe, seed=1, **how).token_ids == first.token_ids
    assert request.ask(pipe, seed=2, **how).token_ids != first.token_ids
    for narrow in ({"top_k": 5}, {"top_p": 0.5}, {"repetition_penalty": 1.5}):
        again = [request.ask(pipe, seed=1, **how, **narrow).token_ids for _ in range(2)]
        assert again[0] == again[1] != first.token_ids
    # A seeded answer neither reads nor moves the other's random numbers.
    streams = [stream(pipe, request, seed=seed, **how) for seed in (1, 2)]
    for _ in itertools.zip_longest(*streams):
        pass
    assert streams[0].result.token_ids == first.token_ids
