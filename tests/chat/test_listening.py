"""Recordings that a chat reads while they are made: like whole ones, at any time, bounded."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oscar_mm import MediaLimits, OscarOmniPipeline, OscarVLPipeline
from oscar_mm.engine.answer import Answer
from oscar_mm.engine.message import Message
from oscar_mm.engine.speech import Speech
from oscar_mm.errors import Cancelled, InputError, RequestTooLarge
from oscar_mm.media.part import MediaPart
from oscar_mm.media.resample import RATE
from oscar_mm.modality import Modality
from oscar_mm.pipelines.families.qwen3_omni_talker import Qwen3OmniTalker
from tests.pipelines.conftest import NEVER, exact
from tests.prompts import noise, tone

HOW: dict[str, Any] = {"max_new_tokens": 6, "logprobs": 2}


@pytest.fixture(scope="module")
def pipe(qwen3_omni_talker_folder: Path) -> OscarOmniPipeline:
    """Attention to earlier blocks is exact, so that nothing but the cuts can differ."""
    return exact(OscarOmniPipeline, qwen3_omni_talker_folder)


@pytest.fixture(autouse=True)
def brief(monkeypatch) -> None:
    """Random weights seldom end their speech themselves."""
    monkeypatch.setattr(Qwen3OmniTalker, "max_frames", 12)


@pytest.fixture(autouse=True)
def all_is_freed(pipe) -> Iterator[None]:
    yield
    assert pipe.store.memory().used_bytes == 0


def sound(seconds: float, *, seed: int = 0) -> np.ndarray:
    """A tone that is loudest in its first tenth of a second."""
    samples = tone(seconds, seed=seed)[0]
    samples[: RATE // 10] *= 1.9
    return samples


def pieces(samples: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Parts of a recording, in a buffer that is overwritten as a microphone's is."""
    buffer = np.zeros(size, np.float32)
    for start in range(0, len(samples), size):
        part = samples[start : start + size]
        buffer[: len(part)] = part
        yield buffer[: len(part)]
    buffer[:] = np.nan


def same(heard: Answer, whole: Answer, late: int = 0) -> None:
    """Compare answers; ``late`` tokens of the earlier one are in the cache already."""
    assert heard.token_ids == whole.token_ids
    assert heard.prompt_tokens + late == whole.prompt_tokens
    assert heard.logprobs is not None and whole.logprobs is not None
    for one, other in zip(heard.logprobs, whole.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.daily("8.0-1600", "16.5-3201", "25.0-12345")
@pytest.mark.parametrize(
    ("seconds", "size"),
    [(0.4, 999), (8.0, 1600), (9.0, 40_000), (16.5, 3201), (17.93, 400_000), (25.0, 12_345)],
)
def test_blocks_are_read_like_the_whole(pipe, seconds: float, size: int) -> None:
    samples = sound(seconds)
    with pipe.chat() as chat, pipe.chat() as other, chat.listen() as listening:
        for part in pieces(samples, size):
            listening.hear(part)
        assert listening.read_tokens >= 104 * (int(seconds - 1) // 8)
        heard = listening.ask("What is it?", **HOW)
        whole = other.ask("What is it?", audio=(samples, RATE), **HOW)
        same(heard, whole)
        assert [x.tokens for x in chat.segments] == [x.tokens for x in other.segments]
        assert listening.seconds == pytest.approx(seconds)


def test_questions_at_any_time_are_turns_about_what_was_heard_since(pipe) -> None:
    parts = [sound(11.2), sound(0.7, seed=1), sound(9.5, seed=2)]
    with pipe.chat("Be brief.") as chat, pipe.chat("Be brief.") as other:
        chat.ask("Hello", max_new_tokens=3)
        other.ask("Hello", max_new_tokens=3)
        with chat.listen() as listening:
            for number, part in enumerate(parts):
                for piece in pieces(part, 4000):
                    listening.hear(piece)
                heard = listening.ask(f"And {number}?", **HOW)
                same(heard, other.ask(f"And {number}?", audio=(part, RATE), **HOW))
            same(listening.ask("Thanks", **HOW), other.ask("Thanks", **HOW))
        assert [turn.prompt for turn in chat.turns] == [turn.prompt for turn in other.turns]
        chat.forget(chat.audio[0])
        chat.undo()


def test_only_the_rest_waits_for_the_question(pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    before = pipe.engine.reader.read_in_chunks

    def counted(prompt: Any, *arguments: Any) -> Any:
        read.append(prompt.tokens)
        return before(prompt, *arguments)

    monkeypatch.setattr(pipe.engine.reader, "read_in_chunks", counted)
    with pipe.chat() as chat, chat.listen() as listening:
        listening.hear(sound(40.0))
        assert sum(read) == listening.read_tokens > 400
        read.clear()
        listening.ask("What is it?", **HOW)
        assert sum(read) < 104 + 13 + 30


def test_packed_pages_hold_what_was_heard(qwen3_omni_talker_folder: Path) -> None:
    pipe = OscarOmniPipeline(qwen3_omni_talker_folder, policy="compact", device="cpu")
    pipe.model.generation_config.eos_token_id = NEVER
    samples = sound(30.0)
    with pipe.chat() as chat, pipe.chat() as other, chat.listen() as listening:
        for part in pieces(samples, 16_000):
            listening.hear(part)
        heard = listening.ask("What is it?", **HOW)
        whole = other.ask("What is it?", audio=(samples, RATE), **HOW)
        assert heard.memory.tokens == whole.memory.tokens
        assert heard.memory.by_modality["audio"] == whole.memory.by_modality["audio"]
        assert heard.logprobs and whole.logprobs
        assert heard.logprobs[0].logprob == pytest.approx(whole.logprobs[0].logprob, abs=0.5)


def test_a_later_louder_sound_raises_only_the_quietest_values(pipe) -> None:
    samples = sound(20.0)
    samples[: 10 * RATE] *= 1e-4
    cut, extractor = pipe.family.sound_blocks(), pipe.processor.feature_extractor
    assert cut is not None
    blocks = [*cut.push(samples), cut.rest()]
    heard = torch.cat([block.inputs["input_features"] for block in blocks], dim=-1)
    how: dict[str, Any] = {"padding": True, "truncation": False, "return_tensors": "pt"}
    whole = extractor([samples], sampling_rate=RATE, **how)
    found = whole["input_features"][..., : heard.shape[-1]]
    assert (heard < found - 0.1).any()
    torch.testing.assert_close(heard.clamp(min=found.max() - 2), found, atol=1e-4, rtol=0)


def test_other_rates_are_resampled_as_in_a_whole_recording(pipe) -> None:
    samples = np.repeat(sound(10.0), 3)
    with pipe.chat() as chat, pipe.chat() as other, chat.listen(rate=48_000) as listening:
        for part in pieces(samples, 4800):
            listening.hear(part)
        same(listening.ask("So?", **HOW), other.ask("So?", audio=(samples, 48_000), **HOW))


def test_blocks_of_a_microphone_may_be_int16_or_empty(pipe) -> None:
    """At 8 kHz, as floats of the same samples are heard."""
    given = (sound(9.7)[::2] * 32767).astype(np.int16)
    answers = []
    for samples in (given, given.astype(np.float64) / 32768):
        with pipe.chat() as chat, chat.listen(8000) as listening:
            for start in range(0, len(samples), 5000):
                listening.hear(samples[start : start + 5000])
                listening.hear(samples[:0])
            answers.append(listening.ask("Who?", **HOW).token_ids)
    assert answers[0] == answers[1]


def test_what_is_heard_during_an_answer_waits(pipe) -> None:
    first, second = sound(9.5), sound(18.0, seed=1)
    with pipe.chat() as chat, pipe.chat() as other, chat.listen() as listening:
        listening.hear(first)
        stream = listening.stream("One?", **HOW)
        next(stream)
        listening.hear(second)
        assert listening.read_tokens == 0
        same(stream.complete(), other.ask("One?", audio=(first, RATE), **HOW))
        assert listening.memory.tokens == chat.memory.tokens
        listening.catch_up()
        assert listening.read_tokens > 200
        now, past = listening.memory, chat.memory
        assert now.tokens["audio"] == past.tokens["audio"] + 208
        assert now.by_modality["audio"] > past.by_modality["audio"]
        same(listening.ask("Two?", **HOW), other.ask("Two?", audio=(second, RATE), **HOW))


def test_a_question_that_is_cancelled_early_is_part_of_the_next(pipe) -> None:
    first, second = sound(9.5), sound(9.7, seed=1)
    with pipe.chat() as chat, pipe.chat() as other, chat.listen() as listening:
        listening.hear(first)
        stream = listening.stream("One?", **HOW)
        chat.stop()
        with pytest.raises(Cancelled):
            stream.complete()
        listening.add(Message("user", ("Well.",)))
        listening.hear(second)
        heard = listening.ask("Two?", **HOW)
        assert len(chat.turns) == 1
        shown = [{"type": "audio", "audio": (x, RATE)} for x in (first, second)]
        contents = [[shown[0], "One?"], "Well.", [shown[1], "Two?"]]
        messages = [{"role": "user", "content": content} for content in contents]
        same(heard, other.ask(messages=messages, **HOW))


def test_messages_between_recordings_keep_their_place(pipe) -> None:
    first, second = sound(9.5), sound(1.7, seed=1)
    with pipe.chat() as chat, pipe.chat() as other, chat.listen() as listening:
        listening.hear(first)
        listening.add(Message("user", ("Listen on.",)))
        listening.hear(sound(3.0, seed=5))
        listening.discard()
        listening.hear(second)
        listening.commit()
        heard = listening.ask(**HOW)
        shown = [{"type": "audio", "audio": (x, RATE)} for x in (first, second)]
        messages = [[shown[0]], "Listen on.", [shown[1]]]
        asked = [{"role": "user", "content": content} for content in messages]
        same(heard, other.ask(messages=asked, **HOW))


def test_images_between_recordings_keep_their_place(pipe) -> None:
    """Before, between and after recordings, also if one is discarded after a cached image."""
    sounds, pictures = [sound(9.5), sound(9.7, seed=1)], [noise(64, 96), noise(96, 64, 1)]
    images = [MediaPart(Modality.IMAGE, one, "picture") for one in pictures]
    with pipe.chat() as chat, pipe.chat() as other:
        with chat.listen(speak=True) as listening:
            listening.hear(sounds[0])
            listening.add(Message("user", ("See", images[0], "this")))
            listening.hear(sound(17.5, seed=4))
            assert listening.read_tokens > 2 * 104 + 6
            listening.discard()
            listening.hear(sounds[1])
            listening.add(Message("user", (images[1], "So?")))
            heard = listening.ask(seed=3, **HOW)
        shown = [{"type": "audio", "audio": (x, RATE)} for x in sounds]
        seen = [{"type": "image", "image": x} for x in pictures]
        contents = [[shown[0]], ["See", seen[0], "this"], [shown[1]], [seen[1], "So?"]]
        messages = [{"role": "user", "content": content} for content in contents]
        whole = other.ask(messages=messages, speak=True, seed=3, **HOW)
        same(heard, whole)
        np.testing.assert_allclose(heard.speech, whole.speech, atol=1e-4)
        found = [[(x.modality, x.tokens, x.label) for x in one.segments] for one in (chat, other)]
        assert [x[:2] for x in found[0]] == [x[:2] for x in found[1]]
        assert [x[2] for x in found[0]][1:] == ["recording", "picture", "recording", "picture"]


def test_only_images_are_added_whole(pipe) -> None:
    with pipe.chat() as chat, chat.listen() as listening:
        whole = MediaPart(Modality.AUDIO, (sound(1.0), RATE), "call")
        with pytest.raises(InputError, match=r"call: only images .* hear\(\)"):
            listening.add(Message("user", (whole,)))


def test_a_coroutine_asks_and_leaves(pipe) -> None:
    async def asked(listening: Any) -> list[Any]:
        return [piece async for piece in listening.stream("Who?", **HOW)]

    with pipe.chat() as chat, chat.listen() as listening:
        listening.hear(sound(9.5))
        assert "".join(asyncio.run(asked(listening))) == chat.turns[0].answer


def test_what_was_read_can_be_discarded(pipe) -> None:
    first, second = sound(9.5), sound(9.6, seed=1)
    with pipe.chat() as chat, pipe.chat() as other:
        with chat.listen(speak=True) as listening:
            listening.hear(sound(17.5, seed=4))
            listening.discard()
            assert listening.read_tokens == 0
            listening.hear(first)
            listening.commit()
            listening.hear(sound(17.5, seed=5))
            listening.discard()
            listening.hear(second)
            heard = listening.ask("So?", seed=3, **HOW)
        shown = [{"type": "audio", "audio": (x, RATE)} for x in (first, second)]
        contents = [[shown[0]], [shown[1], "So?"]]
        messages = [{"role": "user", "content": content} for content in contents]
        whole = other.ask(messages=messages, speak=True, seed=3, **HOW)
        same(heard, whole)
        np.testing.assert_allclose(heard.speech, whole.speech, atol=1e-4)


def test_bounds(pipe, qwen3_omni_talker_folder: Path) -> None:
    short = OscarOmniPipeline(
        qwen3_omni_talker_folder,
        policy="bf16",
        device="cpu",
        max_context=400,
        limits=MediaLimits(max_audio_seconds=50),
    )
    with short.chat() as chat:
        with chat.listen() as listening, pytest.raises(InputError, match="50"):
            listening.hear(np.zeros(51 * RATE, np.float32))
        with chat.listen() as listening:
            listening.hear(sound(25.0))
            with pytest.raises(RequestTooLarge):
                listening.hear(sound(20.0))
            listening.discard()
            listening.hear(sound(9.5))
            listening.ask("What?", **HOW)
        listening = chat.listen()
        listening.hear(sound(9.5))
        listening.close()
        with pytest.raises(RuntimeError, match="listen"):
            listening.hear(sound(1.0))
    assert short.store.memory().used_bytes == 0


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (np.zeros((2, 100), np.float32), r"\(2, 100\)"),
        (np.zeros(100, np.int32), "int32"),
        (np.full(100, np.nan, np.float32), "NaN"),
        (np.full(100, 20_000.0, np.float32), "-1..1"),
    ],
)
def test_faulty_samples_are_refused(pipe, samples: np.ndarray, message: str) -> None:
    with pipe.chat() as chat, chat.listen() as listening:
        with pytest.raises(InputError, match=message):
            listening.hear(samples)
        listening.discard()
        listening.hear(sound(0.5))
        listening.ask("Who?", **HOW)


def test_faulty_calls_are_refused(pipe, qwen3_vl_folder: Path) -> None:
    silent = OscarVLPipeline(qwen3_vl_folder, device="cpu")
    with silent.chat() as chat, pytest.raises(InputError, match="Qwen3-VL does not support audio"):
        chat.listen()
    with pipe.chat() as chat:
        with pytest.raises(InputError, match="rate"):
            chat.listen(10)
        with pytest.raises(InputError, match="whole number"):
            chat.listen(16000.0)
        with chat.listen() as listening, pytest.raises(InputError, match="nothing was heard"):
            listening.ask()
        with chat.listen() as listening:
            listening.hear(np.zeros(100, np.float32))
            with pytest.raises(InputError, match="too short"):
                listening.ask("What?")
        with chat.listen() as listening:
            listening.hear(sound(9.5))
            chat.ask("Something else", **HOW)
            with pytest.raises(InputError, match="other turns"):
                listening.ask("What?")


def test_a_chat_listens_while_others_need_its_memory(
    qwen3_omni_talker_folder: Path, tmp_path: Path
) -> None:
    pipe = OscarOmniPipeline(
        qwen3_omni_talker_folder, policy="bf16", device="cpu", kv_budget="2.3MB", spill=tmp_path
    )
    with pipe.chat() as chat, pipe.chat() as other, chat.listen() as listening:
        chat.ask("Hello", max_new_tokens=2)
        listening.hear(sound(17.5))
        other.ask("Hi " * 150, max_new_tokens=2)
        listening.hear(sound(9.5))
        assert listening.ask("What?", max_new_tokens=3).text is not None
    assert pipe.store.memory().used_bytes == 0


def test_an_answer_is_shortened(pipe) -> None:
    with pipe.chat() as chat, pipe.chat() as other:
        whole = chat.ask("What is it?", **HOW)
        chat.shorten_answer(2)
        kept = pipe.processor.tokenizer.decode(whole.token_ids[:4])
        assert (chat.turns[0].answer, chat.turns[0].finish_reason) == (kept, "interrupted")
        other.ask("What is it?", max_new_tokens=4)
        same(chat.ask("Go on", **HOW), other.ask("Go on", **HOW), late=1)
        with pytest.raises(InputError, match="has 6 tokens"):
            chat.shorten_answer(7)
        chat.undo()
        chat.undo()
        with pytest.raises(InputError, match="has 0 tokens"):
            chat.shorten_answer(1)


def conversation(said: list[tuple[np.ndarray | None, str]], answers: list[str]) -> list[Any]:
    """Messages of recordings and texts, with the answers to all but the last one."""
    messages: list[dict[str, Any]] = []
    for (samples, text), answer in zip(said, [*answers, ""], strict=True):
        shown = [] if samples is None else [{"type": "audio", "audio": (samples, RATE)}]
        messages += [{"role": "user", "content": [*shown, text]}]
        messages += [{"role": "assistant", "content": answer}]
    return messages[:-1]


def test_answers_are_spoken_as_that_to_the_whole_conversation_is(pipe) -> None:
    """The talker reads the media of all questions, also of those whose answers are silent."""
    parts = [sound(17.5), sound(9.5, seed=2), sound(2.5, seed=1)]
    with pipe.chat() as chat, chat.listen(speak=True) as listening:
        for part in pieces(parts[0], 8000):
            listening.hear(part)
        one = listening.ask("One?", max_new_tokens=2, seed=1)
        listening.hear(parts[1])
        silent = [*listening.stream("Two?", speak=False, max_new_tokens=2).with_speech()]
        assert not any(isinstance(piece, Speech) for piece in silent)
        listening.hear(parts[2])
        three = listening.ask("Three?", max_new_tokens=6, seed=3)
        four = chat.ask("Four?", speak=True, max_new_tokens=6, seed=4)
        answers = [turn.answer for turn in chat.turns]
    said = [*zip(parts, ["One?", "Two?", "Three?"], strict=True), (None, "Four?")]
    for count, answer in ((1, one), (3, three), (4, four)):
        told = conversation(said[:count], answers[: count - 1])
        seed, length = count, 2 if count == 1 else 6
        whole = pipe(messages=told, speak=True, seed=seed, max_new_tokens=length)
        assert whole.token_ids == answer.token_ids and answer.speech is not None
        np.testing.assert_allclose(answer.speech, whole.speech, atol=1e-3)


def test_a_shortened_answer_is_followed_by_a_spoken_one(pipe) -> None:
    [token] = pipe.processor.tokenizer(" the")["input_ids"]
    how: dict[str, Any] = {"max_new_tokens": 6, "seed": 2, "logit_bias": {token: 100}}
    with pipe.chat() as chat, chat.listen(speak=True) as listening:
        listening.hear(sound(9.5))
        listening.ask("One?", **how)
        chat.shorten_answer(3)
        assert chat.turns[0].answer == " the" * 3
        two = listening.ask("Two?", **how)
        told = conversation([(sound(9.5), "One?"), (None, "Two?")], [chat.turns[0].answer])
    whole = pipe(messages=told, speak=True, **how)
    assert two.token_ids == whole.token_ids
    np.testing.assert_allclose(two.speech, whole.speech, atol=1e-3)


@pytest.mark.daily("True")
@pytest.mark.parametrize("late", [False, True])
def test_the_talker_forgets_what_it_has_not_read_yet(pipe, *, late: bool) -> None:
    """What is forgotten before the talker reads it is like what is forgotten after that."""
    heard = []
    for speaks in (True, False):
        with pipe.chat() as chat, chat.listen(speak=True) as listening:
            if late:
                listening.ask("Zero?", max_new_tokens=2, seed=1)
            for number in range(2):
                listening.hear(sound(2.5, seed=number))
                listening.stream("So?", speak=speaks, max_new_tokens=2, seed=1).complete()
            chat.forget(chat.audio[0])
            heard.append(listening.ask("And now?", max_new_tokens=6, seed=2))
            chat.undo()
            again = listening.ask("And now?", max_new_tokens=6, seed=2)
            np.testing.assert_allclose(again.speech, heard[-1].speech, atol=1e-3)
    assert heard[0].token_ids == heard[1].token_ids
    np.testing.assert_allclose(heard[0].speech, heard[1].speech, atol=1e-3)


def test_who_speaks(pipe, qwen3_omni_folder: Path) -> None:
    with pipe.chat() as chat:
        with pytest.raises(InputError, match="speaker requires speak=True"):
            chat.listen(speaker="ethan")
        with chat.listen(speak=True) as listening, pytest.raises(InputError, match="stop"):
            listening.ask("Hello", stop=["."])
        chat.ask("What?", audio=(sound(1.0), RATE), max_new_tokens=1)
        with pytest.raises(InputError, match="has not heard the media of an earlier turn"):
            chat.listen(speak=True)
    mute = exact(OscarOmniPipeline, qwen3_omni_folder)
    with mute.chat() as chat, pytest.raises(InputError, match="no talker"):
        chat.listen(speak=True)
