"""Prefix cache: a beginning is read once, and shared only by prompts that equal it exactly."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from oscar_mm import InputError, OscarOmniPipeline, OscarVLPipeline
from oscar_mm.engine.prompt import remaining
from oscar_mm.pages.layout import PAGE_TOKENS
from tests.pipelines.conftest import NEVER
from tests.prompts import clip, noise, prepare, tone

FAMILIES = {
    "llava": (OscarVLPipeline, "llava_next_folder"),
    "qwen": (OscarVLPipeline, "qwen3_vl_folder"),
    "omni": (OscarOmniPipeline, "qwen3_omni_folder"),
}
A, B = noise(300, 260), noise(280, 300, 1)
# Of several media the later ones change; LLaVA reads only images, and only Omni hears.
REQUESTS = {
    "llava": [{"images": [A, B]}, {"images": [A, noise(70, 90, 2)]}, {"images": [A]}],
    "qwen": [
        {"images": [A, B], "videos": [clip(6)]},
        {"images": [A, B], "videos": [clip(4, 9)]},
        {"images": [A], "videos": [clip(6)]},
    ],
    "omni": [
        {"images": [A], "videos": [clip(4)], "audio": [tone(6), tone(3)]},
        {"images": [A], "videos": [clip(4)], "audio": [tone(6), tone(2, 300)]},
        {"images": [A], "videos": [clip(6, 9)], "audio": [tone(6)]},
    ],
}


def pipeline(kind: Any, folder: Path, **options: Any) -> Any:
    options = {"policy": "bf16", "prefix_cache": "1GB"} | options
    pipe = kind(folder, device="cpu", **options)
    pipe.model.generation_config.eos_token_id = NEVER
    return pipe


@pytest.fixture(scope="module")
def folder(qwen3_vl_folder) -> Path:
    return qwen3_vl_folder


@contextmanager
def tokens_read(pipe: Any) -> Iterator[list[int]]:
    """Record the number of tokens of each prompt that is read within the block. (A hook on the
    model might change its input, so that prefixes would not be shared.)"""
    seen, reader = list[int](), pipe.engine.reader
    prefill_passes, read_in_chunks = reader.prefill_passes, reader.read_in_chunks

    def several(prompts: Any, *args: Any, **kwargs: Any) -> Any:
        seen.extend(prompt.tokens for prompt in prompts)
        return prefill_passes(prompts, *args, **kwargs)

    def one(prompt: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(prompt.tokens)
        return read_in_chunks(prompt, *args, **kwargs)

    with (
        patch.object(reader, "prefill_passes", several),
        patch.object(reader, "read_in_chunks", one),
    ):
        yield seen


@pytest.mark.daily("qwen")
@pytest.mark.parametrize("name", FAMILIES)
def test_answers_are_those_without(name, request) -> None:
    kind, folder = FAMILIES[name][0], request.getfixturevalue(FAMILIES[name][1])
    plain, pipe = pipeline(kind, folder, prefix_cache=None), pipeline(kind, folder)
    options = {"system": "Look at all of it, then be brief.", "max_new_tokens": 5}
    for number, media in enumerate(REQUESTS[name]):
        for question in ("What is it?", "How many are there in all?"):
            expected = plain(prompt=question, **{"images": None} | media, **options)
            before = pipe.prefixes.tokens_saved
            with tokens_read(pipe) as read:
                answer = pipe(prompt=question, **{"images": None} | media, **options)
            saved = pipe.prefixes.tokens_saved - before
            assert answer.token_ids == expected.token_ids
            assert answer.prompt_tokens == expected.prompt_tokens == read[0] + saved
            # All but the question, or all up to the first medium that differs.
            if question.startswith("How"):
                assert read[0] < 40
            elif number:
                assert saved > 20
        chat = pipe.chat(options["system"])
        held = pipe.store.memory().used_bytes
        said = chat.ask("How many are there in all?", **media, max_new_tokens=5)
        assert said.token_ids == expected.token_ids
        assert said.memory.shared_bytes > 0.5 * said.memory.kv_bytes * (name != "omni")
        assert pipe.store.memory().used_bytes - held < 0.6 * said.memory.kv_bytes
        later = plain.chat(options["system"])
        later.ask("How many are there in all?", **media, max_new_tokens=5)
        more = {"prompt": "And now?", "images": [B], "max_new_tokens": 5}
        assert chat.ask(**more).token_ids == later.ask(**more).token_ids
    assert pipe.prefixes.misses == 1
    assert f"{pipe.prefixes.hits} hits, 1 misses" in str(pipe.prefixes)


@pytest.mark.daily("qwen")
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_a_batch_share(name, request) -> None:
    kind, folder = FAMILIES[name][0], request.getfixturevalue(FAMILIES[name][1])
    plain, pipe = pipeline(kind, folder, prefix_cache=None), pipeline(kind, folder)
    questions = ("What is it?", "How many are there in all?", "Is it?", "Why?")
    requests = [
        {"prompt": question, "max_new_tokens": 5, "repetition_penalty": penalty, **media}
        for media in REQUESTS[name][::2]
        for question, penalty in zip(questions, (1.0, 1.3, 1.0, 1.1), strict=True)
    ]
    requests.append({"prompt": "And without any pictures?", "max_new_tokens": 5})
    expected = [result.answer for result in plain.batch(requests)]
    with tokens_read(pipe) as read:
        found = [result.answer for result in pipe.batch(requests)]
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert [one.prompt_tokens for one in found] == [one.prompt_tokens for one in expected]
    # Two beginnings, and then the questions alone.
    assert sum(tokens > 60 for tokens in read) <= 2
    assert (pipe.prefixes.hits, pipe.prefixes.misses) == (7, 2)
    for one in found[:-1]:
        assert 0.5 * one.memory.kv_bytes < one.memory.shared_bytes < one.memory.kv_bytes


def test_one_pixel_and_one_sample(folder, qwen3_omni_folder) -> None:
    pipe = pipeline(OscarVLPipeline, folder)
    changed = A.copy()
    changed[-1, -1, 0] ^= 1
    moved = clip(6)
    moved[-1, -1, -1, -1] ^= 1
    ask = {"prompt": "What is it?", "max_new_tokens": 2}
    pipe([A], videos=[clip(6)], **ask)
    whole = pipe.prefixes.bytes
    for picture, video in ((changed, clip(6)), (A, moved)):
        before = pipe.prefixes.tokens_saved
        with tokens_read(pipe) as read:
            answer = pipe([picture], videos=[video], **ask)
        saved = pipe.prefixes.tokens_saved - before
        assert saved + read[0] == answer.prompt_tokens
        assert saved > 50 if picture is A else saved == 0
        assert read[0] > 20
    assert pipe.prefixes.bytes > 2 * whole
    omni = pipeline(OscarOmniPipeline, qwen3_omni_folder)
    samples, rate = tone(6)
    other = samples.copy()
    other[50_000] = np.nextafter(other[50_000], np.float32(1))
    for recording in (samples, other):
        with tokens_read(omni) as read:
            omni(prompt="What is it?", audio=(recording, rate), max_new_tokens=2)
        assert read[0] > 78
    with tokens_read(omni) as read:
        omni(prompt="What was it?", audio=(other, rate), max_new_tokens=2)
    assert read[0] < 40


def test_never_across_processor_settings(folder) -> None:
    pipe = pipeline(OscarVLPipeline, folder)
    pipe([A], "What is it?", max_new_tokens=2)
    # Of the same number of tokens.
    pipe.processor.image_processor.image_mean = [0.4, 0.5, 0.5]
    with tokens_read(pipe) as read:
        pipe([A], "What is it?", max_new_tokens=2)
    assert pipe.prefixes.hits == 0 and read[0] > 60
    pipe([A], "What is it?", max_new_tokens=2)
    assert pipe.prefixes.hits == 1


def test_text_is_shared_across_processor_settings(folder) -> None:
    """They matter only to media, so that the text before an image is shared too."""
    pipe, text = pipeline(OscarVLPipeline, folder), "What is it? " * 60
    pipe([A], system=text, prompt="What is it?", max_new_tokens=2)
    pipe.processor.image_processor.image_mean = [0.4, 0.5, 0.5]
    for images, hits in (([A], 1), ([], 2)):
        with tokens_read(pipe) as read:
            pipe(images, system=text, prompt="Why is it?", max_new_tokens=2)
        assert pipe.prefixes.hits == hits and pipe.prefixes.tokens_saved % PAGE_TOKENS == 0
        assert pipe.prefixes.tokens_saved >= hits * PAGE_TOKENS and len(read) == 1


def test_never_if_the_model_changes_during_a_prefill(folder) -> None:
    """A hook that appears during a prefill changes what the prefix holds, and may be removed."""
    pipe = pipeline(OscarVLPipeline, folder)
    layer = pipe.model.get_submodule("model.language_model.layers.1")
    added = []

    def add(*_: object) -> None:
        if not added:
            added.append(layer.register_forward_pre_hook(lambda _, given: (given[0] * 1.5,)))

    with pipe.model.get_input_embeddings().register_forward_hook(add):
        pipe([A], "What is it?", max_new_tokens=2)
        pipe([B], "What is it?", max_new_tokens=2)  # with the hook
        added[0].remove()
        pipe([A], "What is it?", max_new_tokens=2)
    assert pipe.prefixes.hits == 0


def test_a_prompt_whose_answer_was_left_is_shared_after_a_change_of_the_model(folder) -> None:
    pipe = pipeline(OscarVLPipeline, folder)
    stream = pipe.stream([A], "What is it?", max_new_tokens=50)
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 10
    while pipe.engine.call(lambda: pipe.engine.scheduler.is_running):
        assert time.monotonic() < deadline
    pipe.engine.call(lambda: None)
    layer = pipe.model.get_submodule("model.language_model.layers.1")
    hook = layer.register_forward_pre_hook(lambda _, given: (given[0] * 1.5,))
    pipe([A], "What is it?", max_new_tokens=2)
    hook.remove()
    assert pipe.prefixes.hits == 0
    pipe([A], "What is it?", max_new_tokens=2)
    assert pipe.prefixes.hits == 1


def test_never_across_filters_of_sound(qwen3_omni_folder) -> None:
    """Mel filters are not a saved setting, but all audio passes through them."""
    pipe = pipeline(OscarOmniPipeline, qwen3_omni_folder)
    ask = {"audio": tone(6), "max_new_tokens": 2}
    pipe(prompt="What is it?", **ask)
    filters = pipe.processor.feature_extractor.mel_filters
    changed = pipe.processor.feature_extractor.mel_filters = filters * 1.5
    pipe(prompt="What is it?", **ask)
    assert pipe.prefixes.hits == 0
    changed[:] = filters  # in place
    pipe(prompt="What is it?", **ask)
    assert pipe.prefixes.hits == 1


def test_packed_pages_are_shared(folder) -> None:
    pipe = pipeline(OscarVLPipeline, folder, policy="channel")
    images = [noise(300, 300, seed) for seed in range(8)]
    first = pipe(images, "What is it?", max_new_tokens=4)
    with tokens_read(pipe) as read:
        chats = [pipe.chat() for _ in range(3)]
        for chat in chats:
            chat.ask("What is it?", images=images, max_new_tokens=4)
    assert read[0] < 30 and first.prompt_tokens > 400
    one = chats[0].memory
    assert one.by_kind["codes"] and one.shared_bytes > 0
    assert pipe.store.memory().used_bytes < 2 * one.kv_bytes
    assert [chat.turns[0].answer for chat in chats] == [chats[0].turns[0].answer] * 3


def test_bounded(folder) -> None:
    pipe = pipeline(OscarVLPipeline, folder, prefix_cache=500_000)
    pictures = [noise(300, 300, seed) for seed in range(4)]
    for picture in pictures:
        pipe([picture], "What is it?", max_new_tokens=1)
        assert 0 < pipe.prefixes.bytes <= 500_000
    assert 1 <= len(pipe.prefixes) < 4
    for picture, known in ((pictures[3], True), (pictures[0], False)):
        before = pipe.prefixes.hits
        pipe([picture], "And what is it now?", max_new_tokens=1)
        assert (pipe.prefixes.hits > before) is known
    used = pipe.store.memory().used_bytes
    pipe.prefixes.clear()
    assert len(pipe.prefixes) == pipe.prefixes.bytes == 0 < used
    assert pipe.store.memory().used_bytes == 0
    pipe(pictures, "Too large to keep?", max_new_tokens=1)
    assert len(pipe.prefixes) == 0
    for size in ("8 gallons", 0, "-1", True, 1.5):
        with pytest.raises(InputError, match="prefix_cache"):
            OscarVLPipeline(folder, device="cpu", prefix_cache=size)


def test_not_within_a_medium(folder) -> None:
    pipe = pipeline(OscarVLPipeline, folder)
    prompt = prepare(pipe, "What is it?", pipe.read_media([A]))
    with pytest.raises(ValueError, match="end within a media item"):
        remaining(prompt, prompt.media[0].start + 1)
    prompt.inputs["unknown"] = prompt.inputs["input_ids"]
    with pytest.raises(NotImplementedError, match="unknown"):
        remaining(prompt, prompt.media[0].stop)
