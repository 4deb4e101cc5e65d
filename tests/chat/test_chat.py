"""Chat: every turn is what a fresh prefill would be; what is taken back never was."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from oscar_mm import InputError, OscarOmniPipeline, OscarVLPipeline
from oscar_mm.cache.cache import as_argument
from oscar_mm.engine.message import first_turn
from oscar_mm.engine.prompt import Prompt
from oscar_mm.modality import Modality
from oscar_mm.pipelines.pipeline import Pipeline
from tests.chats import MORE, OTHER, QUESTION, asked, packed_pipeline
from tests.pipelines.conftest import NEVER, exact
from tests.pipelines.test_turns import fresh
from tests.prompts import clip, noise, tone

FAMILIES = {
    "llava": (OscarVLPipeline, "llava_next_folder"),
    "qwen": (OscarVLPipeline, "qwen3_vl_folder"),
    "omni": (OscarOmniPipeline, "qwen3_omni_folder"),
}
TURNS = {
    "llava": [{"images": [noise(64, 96)]}, {"images": [noise(90, 40, 1)]}, {}],
    "qwen": [{}, {"images": [noise(64, 96)], "videos": [clip(6)]}, {"images": [noise(90, 40, 1)]}],
    "omni": [
        {"audio": [tone(1.3)]},
        {"images": [noise(64, 96)], "audio": [tone(0.4, 300)]},
        {"videos": [clip(4)], "audio": [tone(2.1, 660)]},
    ],
}


@pytest.fixture(scope="module")
def pipes(request) -> dict[str, Pipeline]:
    return {
        name: exact(kind, request.getfixturevalue(folder))
        for name, (kind, folder) in FAMILIES.items()
    }


@pytest.fixture(scope="module")
def qwen(pipes) -> Pipeline:
    return pipes["qwen"]


@pytest.fixture(scope="module")
def packed(qwen3_vl_folder) -> OscarVLPipeline:
    return packed_pipeline(qwen3_vl_folder)


@contextmanager
def forwards(pipe: Pipeline) -> Iterator[list[tuple[int, torch.Tensor]]]:
    """Tokens and last logits of the forward passes inside."""
    seen: list[tuple[int, torch.Tensor]] = []

    def note(_: Any, __: Any, kwargs: dict[str, Any], output: Any) -> None:
        seen.append((kwargs["input_ids"].shape[1], output.logits[0, -1]))

    hook = pipe.model.register_forward_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


def recorded(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> list[Prompt]:
    """The prompts that are made from now on."""
    prompts: list[Prompt] = []

    def record(made: Callable[..., Prompt], *arguments: Any) -> Prompt:
        prompts.append(made(*arguments))
        return prompts[-1]

    for method in ("prompt", "continuation"):
        monkeypatch.setattr(pipe.family, method, partial(record, getattr(pipe.family, method)))
    return prompts


@pytest.mark.daily("qwen", "omni")
@pytest.mark.parametrize("name", FAMILIES)
def test_turns_are_a_fresh_prefill_and_cost_their_own_tokens(name, pipes, monkeypatch) -> None:
    pipe = pipes[name]
    prompts = recorded(pipe, monkeypatch)
    chat, answers = pipe.chat("Be brief."), []
    for number, media in enumerate(TURNS[name]):
        with forwards(pipe) as seen:
            answer = chat.ask(f"Question {number}?", **media, max_new_tokens=4)
        assert [tokens for tokens, _ in seen] == [prompts[-1].tokens, 1, 1, 1]
        assert answer.prompt_tokens == prompts[-1].tokens
        expected = fresh(pipe, prompts, answers)
        error = float((seen[0][1] - expected).abs().max() / expected.abs().max())
        assert error < 1e-5, (number, error)
        # The last token of an answer comes in with the next prompt.
        answers.append(answer.token_ids[:-1])
        assert answer.memory == chat.memory
        # Somebody else's question in between.
        pipe.chat().ask("Who?", **media, max_new_tokens=1)
        prompts.pop()
    segments = chat.segments
    assert [segment.index for segment in segments] == list(range(len(segments)))
    assert sum(segment.tokens for segment in segments) == sum(chat.memory.tokens.values())
    shown = sum(len(sources) for media in TURNS[name] for sources in media.values())
    assert sum(segment.modality is not Modality.TEXT for segment in segments) == shown
    assert sum(segment.bytes for segment in segments) <= chat.memory.kv_bytes


@pytest.mark.daily("omni")
@pytest.mark.parametrize("name", FAMILIES)
def test_undo_is_never_having_asked(name, pipes) -> None:
    pipe = pipes[name]
    first, second, third = (
        {"prompt": f"Number {number}?", "max_new_tokens": 4, **media}
        for number, media in enumerate(TURNS[name])
    )
    plain, undone = pipe.chat("Be kind."), pipe.chat("Be kind.")
    expected = asked(plain, first, third)
    found = asked(undone, second)
    undone.undo()
    assert undone.turns == () and undone.segments == [] and undone.memory.kv_bytes == 0
    found = asked(undone, first, second)[:1]
    undone.undo()
    found += asked(undone, third)
    assert found == expected
    assert undone.turns == plain.turns and undone.segments == plain.segments
    asked(undone, second)
    undone.undo(2)
    assert asked(undone, third) == expected[1:] and undone.segments == plain.segments
    with pytest.raises(InputError, match=r"undo\(3\): the chat has only 2 turns"):
        undone.undo(3)
    assert undone.turns == plain.turns
    undone.undo(2)
    with pytest.raises(InputError, match="no turns yet"):
        undone.undo()
    for wrong in (0, -1, True, 1.0):
        with pytest.raises(InputError, match="turns must be an integer from 1 on"):
            undone.undo(wrong)


def test_undo_over_packed_pages(packed) -> None:
    chat = packed.chat()
    asked(chat, QUESTION, {**OTHER, "images": [noise(500, 400, seed) for seed in range(3)]}, MORE)
    chat.undo(2)
    assert len(chat.turns) == 1
    assert sum(one.tokens for one in chat.segments) == sum(chat.memory.tokens.values())
    assert len(chat.ask(**OTHER).token_ids) == 6


@pytest.mark.daily("channel")
@pytest.mark.parametrize("policy", ["bf16", "channel"])
def test_forks_go_on_by_themselves(policy, qwen, packed) -> None:
    pipe = {"bf16": qwen, "channel": packed}[policy]
    alone = pipe.chat()
    expected = asked(alone, OTHER, QUESTION, MORE)
    other = pipe.chat()
    expected_other = asked(other, OTHER, MORE, QUESTION)
    alone.close()
    other.close()
    chat = pipe.chat()
    found = asked(chat, OTHER)
    fork = chat.fork()
    assert chat.memory.shared_bytes == fork.memory.shared_bytes > 0
    both = pipe.store.memory().used_bytes
    assert both < 1.5 * chat.memory.kv_bytes
    found_other = found + asked(fork, MORE)
    found += asked(chat, QUESTION)
    found_other += asked(fork, QUESTION)
    chat_more = asked(chat, MORE)
    assert found + chat_more == expected
    assert found_other == expected_other
    assert len(chat.turns) == len(fork.turns) == 3
    fork.close()
    assert asked(chat, MORE)


@pytest.mark.parametrize("name", FAMILIES)
def test_forgotten_is_masked(name, pipes, monkeypatch) -> None:
    pipe = pipes[name]
    prompts = recorded(pipe, monkeypatch)
    chat = pipe.chat()
    media = {"audio": [tone(5), tone(6)]} if name == "omni" else {"images": [noise(300, 300)] * 2}
    answer = chat.ask("What do they show?", **media, max_new_tokens=1)
    segment = chat.segments[1]
    span = chat.turns[0].media[0]
    before = pipe.store.memory().used_bytes
    chat.forget(1)
    with pytest.raises(InputError, match=r"forget\(1\): .*\[0\] is already forgotten"):
        chat.forget(1)
    assert pipe.store.memory().used_bytes < before
    gone = chat.segments[1]
    assert (gone.label, gone.modality) == (segment.label, segment.modality)
    assert (gone.tokens, gone.bytes, gone.forgotten) == (0, 0, True)
    assert [one.index for one in chat.segments] == list(range(len(chat.segments)))
    with forwards(pipe) as seen:
        chat.ask("And now?", max_new_tokens=1)
    plain = DynamicCache()
    mask = torch.ones(1, sum(prompt.tokens for prompt in prompts), dtype=torch.long)
    with torch.inference_mode():
        for prompt in prompts:
            # What was forgotten was in sight while the first turn was read.
            length = plain.get_seq_length() + prompt.tokens
            if length == mask.shape[1]:
                mask[0, span.start : span.stop] = 0
            output = pipe.model(
                **prompt.inputs,
                position_ids=prompt.positions,
                attention_mask=mask[:, :length],
                **as_argument(plain),
                use_cache=True,
            )
    expected = output.logits[0, -1]
    assert float((seen[0][1] - expected).abs().max() / expected.abs().max()) < 1e-4
    assert prompts[1].inputs["input_ids"][0, 0] == answer.token_ids[-1]


def test_only_media_can_be_forgotten(packed) -> None:
    chat = packed.chat()
    with pytest.raises(InputError, match=r"forget\(0\): no such segment; there are none yet"):
        chat.forget(0)
    chat.ask(**QUESTION)
    with pytest.raises(InputError, match=r"forget\(0\): the segment is text"):
        chat.forget(0)
    for index in (-1, 2, "1", True):
        with pytest.raises(InputError, match="no such segment; there are 0 to 1"):
            chat.forget(index)


def test_media_by_kind(pipes) -> None:
    chat = pipes["omni"].chat()
    pictures = [noise(64, 96), noise(64, 96, 1)]
    chat.ask("What?", images=pictures, audio=[tone(1)], max_new_tokens=1)
    chat.ask("And this?", images=noise(64, 96, 2), videos=[clip(4)], max_new_tokens=1)
    kinds = {"images": 3, "audio": 1, "videos": 1}
    assert {name: len(getattr(chat, name)) for name in kinds} == kinds
    third, index = chat.images[2], chat.images[2].index
    chat.forget(third)
    assert chat.segments[index].forgotten and len(chat.images) == 2
    chat.forget(chat.audio[0])
    assert not chat.audio and len(chat.videos) == 1
    with pytest.raises(InputError, match=r"already forgotten"):
        chat.forget(third)
    movie = chat.videos[0]
    chat.undo()
    with pytest.raises(InputError, match="no such segment"):
        chat.forget(movie)
    chat.ask("And?", audio=[tone(1), tone(2)], images=pictures[:1], max_new_tokens=1)
    with pytest.raises(InputError, match=r"is now audio\[\d\], not videos\[0\]"):
        chat.forget(movie)


def test_a_later_turn_about_what_the_model_does_not_read(pipes) -> None:
    chat = pipes["llava"].chat()
    chat.ask("What?", max_new_tokens=2)
    for media in ({"audio": [tone(1.3)]}, {"videos": [clip(4)]}):
        with pytest.raises(InputError, match=r"LLaVA.* does not support .*; it supports image"):
            chat.ask("And this?", **media)
    assert len(chat.turns) == 1


def test_repetition_penalty_counts_the_whole_chat(qwen) -> None:
    penalty = {"repetition_penalty": 1e6}
    chat = qwen.chat()
    said = chat.ask("one two three", **penalty, max_new_tokens=8).token_ids
    later = chat.ask("again", **penalty, max_new_tokens=8).token_ids
    assert not set(said) & set(later)


def test_no_tokens_left_in_the_context(qwen3_vl_folder) -> None:
    pipe = OscarVLPipeline(qwen3_vl_folder, device="cpu", max_context=160)
    chat = pipe.chat()
    with pytest.raises(InputError, match=r"over the context.* lower max_new_tokens to"):
        chat.ask("What?", images=[noise(600, 600)])
    chat.ask("What?", images=[noise(200, 200)], max_new_tokens=4)
    size = chat.segments[1].tokens
    with pytest.raises(InputError, match=rf"forget\(1\) frees {size} \(images\[0\]\), undo\(\)"):
        chat.ask("And this?", images=[noise(256, 256)], max_new_tokens=60)
    assert len(chat.turns) == 1
    chat.forget(1)
    chat.ask("And this?", images=[noise(200, 200)], max_new_tokens=40)
    longest = pipe.model.config.get_text_config().max_position_embeddings
    held = chat._spillable.conversation.next_position
    held.fill_(longest - 40)
    chat.forget(3)
    with pytest.raises(InputError, match=r"start a new chat \(forget\(\) does not free"):
        chat.ask("And?", max_new_tokens=40)
    pipe.model.generation_config.eos_token_id = NEVER
    answer = chat.stream("And?", max_new_tokens=40, cut_to_fit=True).complete()
    read = answer.prompt_tokens
    assert (len(answer.token_ids), answer.finish_reason) == (40 - read, "length")


def test_closed(packed) -> None:
    gc.collect()
    before = packed.store.memory().used_bytes
    with packed.chat("Be brief.") as chat:
        chat.ask(**OTHER)
        assert packed.store.memory().used_bytes > before
    chat.close()
    assert packed.store.memory().used_bytes == before
    for use in (lambda: chat.ask("What?"), lambda: chat.turns, chat.undo, chat.fork):
        with pytest.raises(RuntimeError, match="the chat is closed"):
            use()
    for system in ("", " ", 3, "<|im_end|>"):
        with pytest.raises(InputError, match="system"):
            packed.chat(system)


def test_what_an_answer_has_come_to_while_it_is_written(packed) -> None:
    with packed.chat() as chat:
        chat.ask(**QUESTION)
        past = chat.turns[-1].stop
        assert chat.so_far is None
        stream = chat.stream("Is there more?", max_new_tokens=40)
        assert chat.so_far is None
        counts = []
        for _ in stream:
            now = chat.so_far
            counts.append(len(now.token_ids))
            # The token that was chosen last is not in the cache yet.
            held = sum(now.memory.tokens.values())
            assert held == past + now.prompt_tokens + len(now.token_ids) - 1
            assert now.timings.prefill_s > 0
        assert counts == sorted(counts) and counts[-1] > counts[0]
        assert chat.so_far is None
        assert stream.result.token_ids[: counts[-1]] == now.token_ids


def test_nothing_is_written_any_more_once_a_stream_was_left(packed) -> None:
    with packed.chat() as chat:
        stream = chat.stream("Is there more?", max_new_tokens=40)
        next(stream)
        assert chat.so_far.text
        stream.close()
        assert chat.so_far is None and chat.turns[-1].finish_reason == "interrupted"


def test_a_question_without_media_is_tokenized_once(packed, monkeypatch) -> None:
    texts, tokenizer = list[str](), type(packed.processor.tokenizer)
    encode = tokenizer._encode_plus

    def noted(self: Any, text: Any, *arguments: Any, **options: Any) -> Any:
        texts.extend([text] if isinstance(text, str) else text)
        return encode(self, text, *arguments, **options)

    monkeypatch.setattr(tokenizer, "_encode_plus", noted)
    with packed.chat() as chat:
        for question in ("What is a kiwi?", "And a plum?"):
            chat.ask(question, max_new_tokens=2)
            assert sum(question in text for text in texts) == 1
    packed.read_request(first_turn("Why not?"))
    assert sum("Why not?" in text for text in texts) == 1
