"""Batches: every request gets what it gets alone, its errors are its own, and media come once."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from oscar_mm import InputError, OscarCache, OscarOmniPipeline, OscarVLPipeline
from oscar_mm.cache.cache import as_argument
from oscar_mm.engine import prefill as prefill_module
from oscar_mm.engine.prompt import Prompt
from oscar_mm.fast_decode import graph_runner
from oscar_mm.media.part import MediaPart
from oscar_mm.pipelines.pipeline import Pipeline
from tests.engine.engine_waits import engine_waits
from tests.pipelines.conftest import NEVER, exact
from tests.prompts import clip, noise, prepare, tone

Request = dict[str, Any]

TEXT = {"prompt": "What did the user ask about the sign?"}
IMAGE = {"prompt": "What is in this image?", "images": [noise(100, 200)]}
TWO = {"prompt": "Compare.", "images": [noise(64, 64, 1), noise(120, 50, 2)]}
VIDEO = {"prompt": "How many people?", "videos": [clip(6)], "system": "Be brief."}
BOTH = {"prompt": "Where?", "images": noise(96, 70, 3), "videos": clip(5, 10)}
SOUND = {"prompt": "Who speaks?", "audio": tone(1.2)}
SOUNDS = {"prompt": "Who?", "audio": [tone(0.4), tone(2.6, 200.0)], "images": noise(40, 90, 3)}

VISION = [TEXT, IMAGE, TWO, VIDEO, BOTH, {"prompt": "Why?"}]
REQUESTS = {
    "llava": [TEXT, IMAGE, TWO, {"prompt": "What?", "images": noise(40, 200, 4)}],
    "vicuna": [TWO, {"prompt": "Why?"}],
    "qwen": VISION,
    "moe": VISION[:4],
    "omni": [*VISION[:2], VIDEO, SOUNDS, SOUND],
}
TOKENS = 12


@pytest.fixture(scope="module")
def moe(qwen3_vl_moe_folder: Path) -> Pipeline:
    return exact(OscarVLPipeline, qwen3_vl_moe_folder)


@pytest.fixture(params=REQUESTS)
def case(request: pytest.FixtureRequest) -> Iterator[tuple[Pipeline, list[Request]]]:
    pipe = request.getfixturevalue(request.param)
    yield pipe, [one | {"max_new_tokens": TOKENS} for one in REQUESTS[request.param]]
    pipe.model.generation_config.eos_token_id = NEVER


def alone(pipe: Pipeline, requests: list[Request]) -> list[Any]:
    images = {} if isinstance(pipe, OscarOmniPipeline) else {"images": None}
    return [pipe(**images | one) for one in requests]


@contextmanager
def passes(pipe: Pipeline) -> Iterator[tuple[list[int], list[int]]]:
    """Notes the tokens of each pass that reads prompts, and the rows of each decode step."""
    prompts: list[int] = []
    rows: list[int] = []
    prefill, step = prefill_module.prefill, graph_runner.GraphRunner.__call__

    def noted(model: Any, prompt: Prompt, *rest: Any, **options: Any) -> torch.Tensor:
        prompts.append(prompt.tokens)
        return prefill(model, prompt, *rest, **options)

    def stepped(steps: Any, tokens: torch.Tensor, ended: torch.Tensor, *more: Any) -> torch.Tensor:
        rows.append(int((~ended).sum()))
        return step(steps, tokens, ended, *more)

    with (
        patch.object(prefill_module, "prefill", noted),
        patch.object(graph_runner.GraphRunner, "__call__", stepped),
    ):
        yield prompts, rows


def prepared(pipe: Pipeline, request: Request) -> Prompt:
    media = {name: request.get(name) for name in ("images", "videos", "audio")}
    return prepare(pipe, request["prompt"], pipe.read_media(**media), request.get("system"))


def logits(pipe: Pipeline, prompt: Prompt) -> torch.Tensor:
    cache = OscarCache("bf16", model=pipe.model)
    cache.expect(prompt.modalities)
    with torch.inference_mode():
        arguments = {**prompt.inputs, "position_ids": prompt.positions}
        output = pipe.model(**arguments, **as_argument(cache), logits_to_keep=1)
    return output.logits[:, -1]


@pytest.mark.daily("llava", "qwen", "omni")
def test_logits_of_concatenated_prompts(case) -> None:
    pipe, requests = case
    prompts = [prepared(pipe, request) for request in requests]
    single = torch.cat([logits(pipe, prompt) for prompt in prompts])
    with engine_waits(pipe):
        caches = [pipe.new_cache() for _ in prompts]
        together = torch.cat(pipe.engine.reader.prefill_batch(prompts, caches))
    assert (together - single).abs().max() < 1e-4 < single.abs().max()
    assert (single[0] - single[1]).abs().max() > 0.1


@pytest.mark.daily("llava", "qwen", "omni")
def test_a_batch_equals_one_by_one(case) -> None:
    pipe, requests = case
    single = alone(pipe, requests)
    with passes(pipe) as (prompts, rows):
        results = pipe.batch(requests)
    assert len(prompts) == 1 and rows == [len(requests)] * (TOKENS - 1)
    assert len({token for answer in single for token in answer.token_ids}) > 3
    assert len({answer.prompt_tokens for answer in single}) > 1, "all are of one length"
    for index, (result, answer) in enumerate(zip(results, single, strict=True)):
        assert (result.index, result.error) == (index, None)
        found = result.answer
        assert found.token_ids == answer.token_ids
        assert (found.text, found.prompt_tokens) == (answer.text, answer.prompt_tokens)
        assert found.finish_reason == "length"
        assert found.memory.tokens == answer.memory.tokens
        assert found.timings.prefill_s > 0 < found.timings.decode_s


@pytest.mark.daily("moe")
def test_rows_that_end_early(case) -> None:
    pipe, requests = case
    free = [answer.token_ids for answer in alone(pipe, requests)]
    # One row ends in the middle, one at its first token; others where they meet these.
    pipe.model.generation_config.eos_token_id = [free[0][TOKENS // 2], free[1][0]]
    # One may write no more than two tokens.
    requests[-1]["max_new_tokens"] = 2
    single = alone(pipe, requests)
    stream = list(pipe.batch_stream(requests))
    # Others may end in the step that follows it at once.
    assert [] in [result.answer.token_ids for result in stream[:2]]
    results = sorted(stream, key=lambda result: result.index)
    assert results[1].answer.token_ids == []
    assert len({len(answer.token_ids) for answer in single}) > 1
    for result, answer in zip(results, single, strict=True):
        assert result.answer.token_ids == answer.token_ids
        assert result.answer.finish_reason == answer.finish_reason
        assert result.answer.memory.tokens == answer.memory.tokens


def test_each_request_has_its_own_sampling(qwen) -> None:
    first = qwen(IMAGE["images"], IMAGE["prompt"], max_new_tokens=TOKENS)
    stop = first.text[4:6]
    sampled = {"temperature": 1.0, "seed": 7, "top_k": 20, "top_p": 0.9}
    requests = [
        IMAGE | {"max_new_tokens": TOKENS, "stop": stop},
        TEXT | {"max_new_tokens": 30} | sampled,
        IMAGE | {"max_new_tokens": 5} | sampled | {"seed": 8},
        # The padding in front of a short prompt was never seen.
        {"prompt": "Why?", "max_new_tokens": 40, "repetition_penalty": 1.4},
        TWO | {"max_new_tokens": 1},
    ]
    single = alone(qwen, requests)
    results = qwen.batch(iter(requests))
    assert [one.answer.token_ids for one in results] == [one.token_ids for one in single]
    assert [one.answer.text for one in results] == [one.text for one in single]
    assert results[0].answer.finish_reason == "stop" and stop not in results[0].answer.text
    lengths = [len(one.answer.token_ids) for one in results]
    assert lengths[0] < TOKENS and lengths[1:] == [30, 5, 40, 1]


def test_prompts_in_chunks(qwen3_vl_folder) -> None:
    pipe = OscarVLPipeline(qwen3_vl_folder, policy="bf16", device="cpu", prefill_chunk=16)
    whole = OscarVLPipeline(qwen3_vl_folder, policy="bf16", device="cpu")
    requests = [one | {"max_new_tokens": 8} for one in VISION]
    expected = [answer.token_ids for answer in alone(whole, requests)]
    results = pipe.batch(requests)
    assert [result.answer.token_ids for result in results] == expected


def test_memory_of_packed_rows(qwen3_vl_folder) -> None:
    pipe = OscarVLPipeline(qwen3_vl_folder, policy="channel", device="cpu")
    long = "Compare the two pictures, and say what is on the sign. " * 20
    requests = [
        {"prompt": long, "images": [noise(256, 256, seed) for seed in range(3)]},
        {"prompt": long, "images": noise(64, 64)},
        TEXT,
    ]
    requests = [one | {"max_new_tokens": TOKENS} for one in requests]
    single = alone(pipe, requests)
    for result, answer in zip(pipe.batch(requests), single, strict=True):
        assert result.answer.token_ids == answer.token_ids
        found, expected = result.answer.memory, answer.memory
        assert found.tokens == expected.tokens and found.bf16_bytes == expected.bf16_bytes
        for kind in ("codes", "scales", "norms", "tails"):
            assert found.by_kind[kind] == expected.by_kind[kind]
        assert found.shared_bytes == 0
    assert single[0].memory.by_kind["codes"] > single[1].memory.by_kind["codes"] > 0


def test_a_bad_request_fails_alone(qwen, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.png"
    damaged.write_bytes(b"This is no picture.")
    bad = [
        ({"images": [damaged], "prompt": "What?"}, r"damaged\.png"),
        ({"images": "missing.png", "prompt": "What?"}, "no such file"),
        ({"prompt": ""}, "prompt is empty"),
        ({"images": []}, "needs a prompt"),
        ({"prompt": "What?", "image": []}, "unknown argument image: choose from images"),
        ({"prompt": "What?", "audio": tone(1.0)}, "unknown argument audio"),
        ({"prompt": "What?", "max_new_tokens": 0}, "max_new_tokens"),
        ({"prompt": "What?", "max_new_tokens": 70_000}, "over the context"),
        ("What?", "must be a dict, not str"),
    ]
    good = [IMAGE | {"max_new_tokens": 4}, TEXT | {"max_new_tokens": 4}]
    results = qwen.batch([good[0], *(request for request, _ in bad), good[1]])
    assert [result.index for result in results] == list(range(len(bad) + 2))
    for result, (_, message) in zip(results[1:-1], bad, strict=True):
        assert result.answer is None and isinstance(result.error, InputError)
        assert message.replace("\\", "") in str(result.error)
    expected = [answer.token_ids for answer in alone(qwen, good)]
    assert [results[0].answer.token_ids, results[-1].answer.token_ids] == expected


def test_what_a_family_does_not_read(llava, omni) -> None:
    [video, image] = llava.batch([VIDEO, IMAGE | {"max_new_tokens": 2}])
    assert "LLaVA-NeXT does not support video" in str(video.error) and image.answer
    [spoken] = omni.batch([TEXT | {"speak": True}])
    assert "unknown argument speak" in str(spoken.error)


@pytest.mark.parametrize(
    ("requests", "options", "message"),
    [
        (TEXT, {}, "list of dicts"),
        ("What?", {}, "list of dicts"),
        (None, {}, "NoneType"),
        ([TEXT], {"batch_size": 0}, "batch_size=0"),
        ([TEXT], {"max_tokens": 1.5}, "max_tokens=1.5"),
    ],
)
def test_bounds_are_checked_at_once(qwen, requests: Any, options: Request, message: str) -> None:
    for ask in (qwen.batch, qwen.batch_stream):
        with pytest.raises(InputError, match=message):
            ask(requests, **options)
    assert qwen.batch([]) == []


def test_how_many_run_at_once(qwen) -> None:
    short = [{"prompt": f"Why {word}?", "max_new_tokens": 3} for word in ("not", "so", "here")]
    long = [{"prompt": "What is on the sign? " * 30, "max_new_tokens": 3}] * 3
    mixed = [one for pair in zip(short, long, strict=True) for one in pair]
    expected = [result.answer.token_ids for result in qwen.batch(mixed, batch_size=1)]
    prompt_tokens = qwen(None, long[0]["prompt"], max_new_tokens=1).prompt_tokens
    for most, bounds in (
        (6, {}),
        (2, {"batch_size": 2}),
        (3, {"max_tokens": 2 * (prompt_tokens + 3)}),
        (1, {"max_tokens": 1}),
    ):
        with passes(qwen) as (_, rows):
            found = qwen.batch(mixed, **bounds)
        assert [result.answer.token_ids for result in found] == expected
        assert max(rows) == most, bounds


def test_media_are_decoded_once_and_not_all_at_once(qwen, monkeypatch) -> None:
    reading = qwen.media_reader.reading
    alive: list[weakref.ref] = []
    most = 0

    @contextmanager
    def counting(*args: Any, **kwargs: Any) -> Iterator[Any]:
        nonlocal most
        with reading(*args, **kwargs) as media:
            alive.extend(weakref.ref(medium.content) for medium in media)
            most = max(most, sum(one() is not None for one in alive))
            yield media

    monkeypatch.setattr(qwen.media_reader, "reading", counting)
    served: list[int] = []

    def requests() -> Iterator[Request]:
        for index in range(10):
            served.append(index)
            yield {"prompt": "What?", "images": noise(64, 64, index), "max_new_tokens": 2}

    results = qwen.batch_stream(requests(), batch_size=1)
    assert next(results).answer and len(served) == 2
    assert len(list(results)) == 9
    assert len(alive) == 10
    assert most <= 2


def test_a_file_that_no_library_understands_is_its_own_request(qwen, monkeypatch) -> None:
    reading = qwen.media_reader.reading

    def surprising(parts: list[MediaPart], **kwargs: Any) -> Any:
        if parts and parts[0].source == "odd.png":
            raise RuntimeError("a decoder's own trouble")
        return reading(parts, **kwargs)

    monkeypatch.setattr(qwen.media_reader, "reading", surprising)
    odd, fine = qwen.batch([{"prompt": "What?", "images": "odd.png"}, TEXT | {"max_new_tokens": 2}])
    assert isinstance(odd.error, RuntimeError) and fine.answer


def test_results_come_as_they_are_finished(qwen) -> None:
    requests = [{"prompt": "Why not?", "max_new_tokens": tokens} for tokens in (6, 2, 4)]
    with passes(qwen) as (_, rows):
        when = [(result.index, len(rows)) for result in qwen.batch_stream(requests)]
    assert [index for index, _ in when] == [1, 2, 0]
    assert when[0][1] < when[1][1] < when[2][1]
    assert np.prod([len(r.answer.token_ids) for r in qwen.batch(requests)]) == 6 * 2 * 4
