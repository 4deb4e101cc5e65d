"""Prompts with media or adapters in mixed passes, against the same prompts alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch

from oscar_mm.engine.message import first_turn
from oscar_mm.engine.mixed_prefill import MixedPrefill
from oscar_mm.engine.request import Request
from oscar_mm.media.part import media_parts
from oscar_mm.pipelines import pipeline_for
from oscar_mm.pipelines.pipeline import Pipeline
from tests.engine.engine import empty, loaded, run, together
from tests.engine.engine_waits import engine_waits
from tests.engine.mixing import mix, read_by_pieces
from tests.pipelines.conftest import NEVER
from tests.prompts import clip, noise

MEDIA = Path(__file__).parents[2] / "examples" / "media"
SIGN, CHART = MEDIA / "street_sign.png", MEDIA / "chart.png"
CARDS = list((MEDIA / "cards").glob("*.png"))
CARD, SOUND = MEDIA / "cards" / "01.png", MEDIA / "clips" / "01.wav"

ASKED: dict[str, list[dict[str, Any]]] = {
    "pocket-vl": [
        {"prompt": "What is on the sign?", "images": [SIGN]},
        {"prompt": "Why?"},
        {"prompt": "What is the code?", "images": [CARD, noise(48, 80)]},
        {"prompt": "What happens?", "videos": [clip(4)]},
        {"prompt": "And now?", "images": [SIGN], "videos": [clip(2, 7)]},
    ],
    "pocket-llava": [
        {"prompt": "What is on the sign?", "images": [SIGN]},
        {"prompt": "Why?"},
        {"prompt": "Compare them.", "images": [noise(48, 80), CARD]},
    ],
    "pocket-omni": [
        {"prompt": "What is said?", "audio": [SOUND]},
        {"prompt": "Why?"},
        {"prompt": "What is the code?", "images": [CARD], "audio": [SOUND]},
        {"prompt": "What happens?", "videos": [clip(4)]},
    ],
}


def asked(pipe: Pipeline, prompt: str, adapter: str | None = None, **media: Any) -> Request:
    options = {"max_new_tokens": 8, "temperature": 0}
    sampling = pipe.sampling(options, ())
    turn = first_turn(prompt, media_parts(**media))
    read = pipe.read_request(turn, sampling.max_new_tokens, adapter=adapter)
    return pipe.new_request(read, sampling, perf_counter())


def exact(name: str, **options: Any) -> Pipeline:
    how = {"device": "cpu", "dtype": "float32", "policy": "bf16"} | options
    pipe = pipeline_for(name)(name, **how)
    pipe.model.generation_config.eos_token_id = NEVER
    return pipe


def answers(pipe: Pipeline, requests: list[dict[str, Any]]) -> list[list[int]]:
    """What is answered to each request alone, without mixed passes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MixedPrefill, "of", lambda *_: None)
        return [together(pipe, [asked(pipe, **request)])[0] for request in requests]


def joined(
    pipe: Pipeline, running: list[Request], joining: list[Request]
) -> tuple[list[list[int]], list[list[int]]]:
    """What is answered to requests that decode when others join, and to those others."""
    for one in running:
        pipe.engine.submit(one)
    pipe.engine.run_until(lambda: all(one.tokens for one in running))
    found = together(pipe, joining)
    run(pipe, running)
    return [one.complete().token_ids for one in running], found


@pytest.mark.daily("pocket-omni")
@pytest.mark.parametrize("name", ASKED)
def test_answers_are_those_alone(name, pieces, small) -> None:
    with pytest.MonkeyPatch.context() as patch:
        expected = answers(exact(name), ASKED[name])
        assert not pieces
        mix(patch)
        pipe = exact(name)
        for order in (1, -1, 1):  # Eagerly, captured and replayed, also where media were before.
            running = [asked(pipe, "Why?") for _ in range(2)]
            joining = [asked(pipe, **x) for x in ASKED[name][::order]]
            assert joined(pipe, running, joining) == (2 * [expected[1]], expected[::order])
    assert {with_step for _, with_step in pieces} == {False, True}
    assert empty(pipe)


@pytest.mark.daily("pocket-llava", "pocket-omni")
@pytest.mark.parametrize("name", ASKED)
def test_logits_and_pages(name, capture, small) -> None:
    """In packed pages of each modality, as a usual prefill stores them."""
    pipe = exact(name, policy="standard")
    requests = [asked(pipe, **x) for x in ASKED[name]]
    with engine_waits(pipe):
        found = read_by_pieces(pipe, requests)
        for request, logits in zip(requests, found, strict=True):
            usual = asked(pipe, "Why?")
            expected = pipe.engine.reader.read(request.prompt, usual.cache)
            assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
            assert request.cache.memory() == usual.cache.memory()
            for layer in range(len(usual.cache.layers)):
                sides = zip(request.cache.unpacked(layer), usual.cache.unpacked(layer), strict=True)
                for mine, theirs in sides:
                    # A few codes are rounded otherwise.
                    assert (mine - theirs).norm() <= 0.02 * theirs.norm()


@contextmanager
def calls_of(tower: torch.nn.Module) -> Iterator[list[int]]:
    """Numbers of images that the tower has read, by call."""
    found = list[int]()

    def note(_: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        if (grids := kwargs["grid_thw"]) is not None:
            found.append(len(grids))
        else:  # The last of several sequences is padding.
            found.append(int((kwargs["cu_seqlens"].diff() > 0).sum()) - 1)

    hook = tower.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield found
    finally:
        hook.remove()


def test_waiting_pictures_are_read_together_and_equal_ones_once(
    qwen3_vl_folder, capture, pieces
) -> None:
    pictures = [noise(64, 96, seed) for seed in (0, 1, 0, 2, 1)]
    wanted = [{"prompt": f"What is this {i}?", "images": [x]} for i, x in enumerate(pictures)]
    wanted[3]["images"] = [pictures[3], pictures[0]]
    expected = answers(loaded(qwen3_vl_folder), wanted)
    pipe = loaded(qwen3_vl_folder)
    running = asked(pipe, "Why?")
    pipe.engine.submit(running)
    pipe.engine.run_until(lambda: len(running.tokens) > 2)
    before = len(running.tokens)
    with calls_of(pipe.model.get_encoder(modality="image")) as calls:
        requests = [asked(pipe, **x) for x in wanted]
        for one in requests:
            pipe.engine.submit(one)
        pipe.engine.run_until(lambda: all(one.tokens for one in requests))
    assert calls == [3]
    assert len(running.tokens) > before  # It was not interrupted for long.
    run(pipe, [running, *requests])
    assert [one.complete().token_ids for one in requests] == expected
    assert empty(pipe)


def test_a_picture_that_is_being_read_is_found_in_the_prefix_cache(
    qwen3_vl_folder, capture, pieces
) -> None:
    picture, other = noise(256, 256), noise(256, 256, 1)
    questions = ["What is this?", "Why?", "Where is it?"]
    wanted = [{"prompt": x, "images": [picture]} for x in questions]
    wanted.insert(2, {"prompt": "What is this?", "images": [other]})
    expected = answers(loaded(qwen3_vl_folder), wanted)
    pipe = loaded(qwen3_vl_folder, prefix_cache="64MB")
    with calls_of(pipe.model.get_encoder(modality="image")) as calls:
        assert together(pipe, [asked(pipe, **x) for x in wanted]) == expected
    assert sum(calls) == 2 and pipe.prefixes.hits == 2


def test_a_tower_that_fails_fails_its_request_only(qwen3_vl_folder, capture, small) -> None:
    """Also if others continue a cache that is not empty."""
    wanted = [{"prompt": "What is this?", "images": [noise(256, 256, x)]} for x in range(3)]
    wanted[1]["images"] = [noise(64, 128, 5)]
    expected = answers(loaded(qwen3_vl_folder), wanted)
    pipe = loaded(qwen3_vl_folder, prefix_cache="64MB")

    def fails(_: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        if any(grid[1] != grid[2] for grid in kwargs["grid_thw"].tolist()):
            raise RuntimeError("the tower says no")

    tower = pipe.model.get_encoder(modality="image")
    hook = tower.register_forward_pre_hook(fails, with_kwargs=True)
    together(pipe, [asked(pipe, "Why?", images=wanted[0]["images"])])
    requests = [asked(pipe, **x) for x in wanted]
    for one in requests:
        pipe.engine.submit(one)
    run(pipe, requests)
    hook.remove()
    with pytest.raises(RuntimeError, match="the tower says no"):
        requests[1].complete()
    assert [requests[i].complete().token_ids for i in (0, 2)] == [expected[0], expected[2]]
    assert pipe.prefixes.hits == 1


def test_rows_have_different_adapters(qwen3_vl_folder, tmp_path, pieces, small) -> None:
    """Prompts, running answers and towers have adapters of their own."""
    pytest.importorskip("peft")
    from tests.lora import saved_adapters

    folders = saved_adapters(qwen3_vl_folder, tmp_path)
    picture = noise(64, 96)
    wanted: list[dict[str, Any]] = [
        {"prompt": "Why?", "adapter": name, "images": images}
        for name in ("towers", None, "decoder")
        for images in ([], [picture])
    ]
    with pytest.MonkeyPatch.context() as patch:
        expected = answers(exact(str(qwen3_vl_folder), adapters=folders), wanted)
        assert len({tuple(answer) for answer in expected}) > 3
        mix(patch)
        pipe = exact(str(qwen3_vl_folder), adapters=folders)
        for _ in range(3):
            running = [asked(pipe, **x) for x in wanted[::2]]
            joining = [asked(pipe, **x) for x in wanted]
            assert joined(pipe, running, joining) == (expected[::2], expected)
    assert {with_step for _, with_step in pieces} == {False, True}
    assert empty(pipe)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ASKED)
def test_media_on_a_gpu(name) -> None:
    """Eagerly, captured and replayed, against the usual prefill."""
    pipe = pipeline_for(name)(name, device="cuda", dtype="bfloat16", policy="standard")
    for _ in range(3):
        requests = [asked(pipe, **x) for x in ASKED[name]]
        with engine_waits(pipe):
            found = read_by_pieces(pipe, requests)
            for request, logits in zip(requests, found, strict=True):
                usual = asked(pipe, "Why?")
                expected = pipe.engine.reader.read(request.prompt, usual.cache)
                assert (logits - expected).abs().max() <= 0.06 * expected.abs().max()
                assert request.cache.memory() == usual.cache.memory()


@pytest.mark.gpu
def test_decode_steps_with_media_on_a_gpu(pieces) -> None:
    pipe = pipeline_for("pocket-vl")("pocket-vl", device="cuda", dtype="bfloat16")
    cards = [{"prompt": "What is the code?", "images": [x]} for x in sorted(CARDS)[:6]]
    expected = together(pipe, [asked(pipe, **x) for x in cards])
    for _ in range(8):
        running, joining = ([asked(pipe, **x) for x in cards] for _ in range(2))
        assert joined(pipe, running, joining) == (expected, expected)
    assert {with_step for _, with_step in pieces} == {False, True}
    assert empty(pipe)
