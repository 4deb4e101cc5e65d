"""Speech of Qwen3-Omni: against transformers' generate, in pieces, together, cancelled."""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oscar_mm import OscarOmniPipeline
from oscar_mm.engine.speech import PIECE_FRAMES, Speech
from oscar_mm.engine.voices import Voices
from oscar_mm.errors import MemoryBusy
from oscar_mm.fast_decode.graph_runner import SWITCH
from oscar_mm.pipelines.families import qwen3_omni_sound, qwen3_omni_talker
from oscar_mm.pipelines.families.qwen3_omni_frames import OmniFrames
from oscar_mm.pipelines.families.qwen3_omni_sound import Sound, Waves
from oscar_mm.pipelines.families.qwen3_omni_talker import OmniVoice, Qwen3OmniTalker
from tests.pipelines.conftest import NEVER
from tests.pipelines.test_qwen3_omni import REQUESTS, Plain
from tests.prompts import noise, tone

UPSAMPLE = 48
"""Samples of a frame of the tiny checkpoint."""
ASKED: dict[str, Any] = {"prompt": "What is it?", "max_new_tokens": 9, "speak": True}
LONG = 2
"""A seed with which the talker speaks the answer to ASKED in 129 frames."""
ENDS = 18
"""A seed with which it does so in 31 frames."""


class Speaker(Plain):
    """Transformers' own speech: one call of generate."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        # transformers looks for the audio tower's window here, but only the thinker has it.
        self.model.talker.config.audio_config = self.model.thinker.config.audio_config
        self.codes = torch.zeros(0)
        self.decode = self.model.code2wav.chunked_decode
        self.model.code2wav.chunked_decode = self._note

    def _note(self, codes: torch.Tensor, **how: Any) -> torch.Tensor:
        self.codes = codes
        return self.decode(codes, **how)

    def say(self, inputs: Any, seed: int, **options: Any) -> np.ndarray:
        """Return the samples of an answer; its last token is not said, so it takes one more."""
        torch.manual_seed(seed)
        _, wave = self.model.generate(
            **{name: value.to(self.model.device) for name, value in inputs.items()},
            return_audio=True,
            thinker_max_new_tokens=ASKED["max_new_tokens"] + 1,
            thinker_eos_token_id=NEVER,
            thinker_do_sample=False,
            **options,
        )
        return wave.reshape(-1).cpu().numpy()


@pytest.fixture(scope="module")
def speaker(qwen3_omni_talker_folder) -> Speaker:
    return Speaker(qwen3_omni_talker_folder)


@pytest.fixture
def codes(monkeypatch) -> list[torch.Tensor]:
    """The frames that voices add, (groups,) codes each."""
    found, add = [], OmniVoice.add

    def note(voice: OmniVoice, frame: torch.Tensor, *rest: Any) -> None:
        found.append(frame)
        add(voice, frame, *rest)

    monkeypatch.setattr(OmniVoice, "add", note)
    return found


def brief(monkeypatch, frames: int) -> None:
    monkeypatch.setattr(Qwen3OmniTalker, "max_frames", frames)


def together(*calls: Callable[[], Any]) -> None:
    """Call functions in a thread each."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def free(pipe: OscarOmniPipeline) -> bool:
    """Whether no cache of the thinker or of the talker has a slot."""
    voices = pipe.engine.scheduler._voices

    def is_empty() -> bool:
        pipe.store.collect()
        kept = voices.live or voices._rows or voices.used_bytes
        return not (kept or pipe.store.memory().used_bytes)

    return pipe.engine.call(is_empty)


@pytest.mark.daily("text", "image")
@pytest.mark.parametrize("name", REQUESTS)
def test_codes_and_samples_are_those_of_transformers(
    speaking, speaker, codes, monkeypatch, name: str
) -> None:
    media = REQUESTS[name]
    inputs = speaker.inputs("What is it?", speaking.read_media(**media))
    for seed, who, frames in ((ENDS, "ethan", 60 if name == "text" else 20), (5, "chelsie", 20)):
        codes.clear()
        brief(monkeypatch, frames)
        expected = speaker.say(inputs, seed, speaker=who, talker_max_new_tokens=frames + 1)
        answer = speaking(**ASKED, **media, seed=seed, speaker=who)
        assert torch.equal(torch.stack(codes, 1), speaker.codes[0])
        np.testing.assert_allclose(answer.speech, expected, atol=2e-4)
        assert answer.speech_tokens == len(codes) > 0
        assert len(codes) < frames or frames == 20, "the talker ends by itself"


def test_the_talker_reads_all_questions(speaking, speaker, monkeypatch) -> None:
    """The talker reads neither the system prompt nor earlier answers."""
    brief(monkeypatch, 12)
    picture = noise(64, 96)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": "A sign."},
        {"role": "user", "content": "Where is it?"},
    ]
    processor = speaker.processor
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    inputs = processor(text=[text], images=[picture], return_tensors="pt")
    inputs = {name: value for name, value in inputs.items() if name != "mm_token_type_ids"}
    expected = speaker.say(inputs, 1, talker_max_new_tokens=13)
    messages[1]["content"][0]["image"] = picture
    asked = {name: value for name, value in ASKED.items() if name != "prompt"}
    answer = speaking(messages=messages, **asked, seed=1)
    np.testing.assert_allclose(answer.speech, expected, atol=2e-4)


@pytest.mark.slow
def test_a_known_prompt_is_said_alike(speaking, monkeypatch) -> None:
    brief(monkeypatch, 12)
    how: dict[str, Any] = {"processor": speaking.processor, "policy": "bf16"}
    pipe = OscarOmniPipeline(speaking.family.outer_model, **how, prefix_cache="1MB")
    for media in ({"audio": tone(20)}, {"prompt": "Why? " * 80}):
        found = [pipe(**ASKED | media, seed=1) for _ in range(2)]
        assert np.allclose(*(answer.speech for answer in found), atol=2e-4)
        assert (found[1].cached_tokens > 0) is ("prompt" in media)


def test_a_prompt_in_chunks_is_said_alike(speaking, speaker, monkeypatch) -> None:
    brief(monkeypatch, 8)
    chunked = OscarOmniPipeline(
        speaking.family.outer_model, processor=speaking.processor, policy="bf16", prefill_chunk=16
    )
    media = REQUESTS["everything"]
    inputs = speaker.inputs("What is it?", speaking.read_media(**media))
    expected = speaker.say(inputs, 1, talker_max_new_tokens=9)
    np.testing.assert_allclose(chunked(**ASKED, **media, seed=1).speech, expected, atol=2e-4)


@pytest.mark.slow
def test_pieces_come_while_words_are_written(speaking) -> None:
    stream = speaking.stream(**ASKED | {"max_new_tokens": 40}, audio=tone(1), seed=LONG)
    pieces = list(stream.with_speech())
    kinds = [isinstance(piece, Speech) for piece in pieces]
    assert kinds.index(True) < len(kinds) - 1 - kinds[::-1].index(False)  # before the last word
    sound = [piece.samples for piece in pieces if isinstance(piece, Speech)]
    assert all(piece.sample_rate == 24_000 for piece in pieces if isinstance(piece, Speech))
    assert {len(samples) for samples in sound[1:-1]} == {PIECE_FRAMES * UPSAMPLE}
    assert np.array_equal(np.concatenate(sound), stream.result.speech)
    assert "".join(piece for piece in pieces if isinstance(piece, str)) == stream.result.text
    plain = speaking.stream(**ASKED | {"max_new_tokens": 40}, audio=tone(1), seed=LONG)
    assert "".join(plain) == stream.result.text  # The stream itself has only text.
    assert np.array_equal(plain.result.speech, stream.result.speech)
    assert free(speaking)


def test_samples_do_not_depend_on_the_pieces(speaking) -> None:
    codes = torch.randint(0, 32, (1, 4, 90), generator=torch.Generator().manual_seed(0))
    model = speaking.family.outer_model.code2wav
    with torch.inference_mode():
        expected = model(codes)[0, 0].numpy()
    waves = Waves(model)
    sounds, found = {size: Sound() for size in (1, 5, 64)}, {1: [], 5: [], 64: []}
    for frame in range(90):
        for sound in sounds.values():
            sound.add(codes[0, :, frame])
        due = [size for size in sounds if (frame + 1) % size == 0 or frame == 89]
        for size, samples in zip(due, waves([sounds[size] for size in due]), strict=True):
            found[size].append(samples)
    for parts in found.values():
        np.testing.assert_allclose(np.concatenate(parts), expected, atol=2e-4)


def test_answers_are_said_together(speaking, monkeypatch) -> None:
    brief(monkeypatch, 16)
    alone = [speaking(**ASKED, audio=tone(1 + seed), seed=seed).speech for seed in range(3)]
    rows, say = [], OmniFrames.say

    def note(self: Any, voices: Any) -> None:
        rows.append(len(voices))
        say(self, voices)

    monkeypatch.setattr(OmniFrames, "say", note)
    streams = [speaking.stream(**ASKED, audio=tone(1 + seed), seed=seed) for seed in range(3)]
    together(*(stream.complete for stream in streams))
    for stream, expected in zip(streams, alone, strict=True):
        np.testing.assert_allclose(stream.result.speech, expected, atol=2e-4)
    assert max(rows) > 1 and free(speaking)


def test_replayed_steps_say_the_same(speaking, monkeypatch) -> None:
    """Steps on fixed tables, whose rows are padded up to a captured number."""
    brief(monkeypatch, 24)
    replays = []

    def capture(function: Callable[[], Any], _: torch.device) -> Callable[[], Any]:
        return lambda: (replays.append(function), function())[1]

    for module in (qwen3_omni_sound, qwen3_omni_talker):
        monkeypatch.setattr(module, "graph_capture", lambda *_, **__: capture)
    how: dict[str, Any] = {"processor": speaking.processor, "policy": "bf16"}
    pipe = OscarOmniPipeline(speaking.family.outer_model, **how)
    alone = [speaking(**ASKED, audio=tone(1 + seed), seed=seed).speech for seed in range(3)]
    streams = [pipe.stream(**ASKED, audio=tone(1 + seed), seed=seed) for seed in range(3)]
    together(*(stream.complete for stream in streams))
    for stream, expected in zip(streams, alone, strict=True):
        np.testing.assert_allclose(stream.result.speech, expected, atol=2e-4)
    kinds = {getattr(function, "func", function).__name__ for function in replays}
    assert kinds == {"_repeatable", "_before", "_after", "_in_place"} and free(pipe)


@pytest.mark.gpu
def test_codes_on_a_gpu_are_those_of_transformers(
    qwen3_omni_talker_folder: Path, codes: list[torch.Tensor], monkeypatch
) -> None:
    brief(monkeypatch, 100)
    how: dict[str, Any] = {"policy": "bf16", "device": "cuda", "dtype": "float32"}
    pipe = OscarOmniPipeline(qwen3_omni_talker_folder, **how)
    pipe.model.generation_config.eos_token_id = NEVER
    speaker = Speaker(qwen3_omni_talker_folder)
    speaker.model.to("cuda")
    inputs = speaker.inputs("What is it?", pipe.read_media(audio=[tone(1)]))
    for seed in (LONG, 5):
        codes.clear()
        expected = speaker.say(inputs, seed, talker_max_new_tokens=101)
        answer = pipe(**ASKED, audio=tone(1), seed=seed)
        assert torch.equal(torch.stack(codes, 1), speaker.codes[0].cpu())
        # Samples are between -1 and 1; convolutions on a GPU choose their algorithm by the shape.
        np.testing.assert_allclose(answer.speech, expected, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["bf16", "standard"])
def test_captured_steps_say_what_eager_steps_say(
    qwen3_omni_talker_folder: Path, codes: list[torch.Tensor], policy: str, monkeypatch
) -> None:
    brief(monkeypatch, 60)
    monkeypatch.setattr(OmniVoice, "is_said", property(lambda voice: voice.frames >= 60))
    found = []
    for graphs in ("on", "off"):
        monkeypatch.setenv(SWITCH, graphs)
        how: dict[str, Any] = {"policy": policy, "device": "cuda", "dtype": "bfloat16"}
        pipe = OscarOmniPipeline(qwen3_omni_talker_folder, **how)
        pipe.model.generation_config.eos_token_id = NEVER
        codes.clear()
        answer = pipe(**ASKED, audio=tone(1), seed=LONG)
        found.append((torch.stack(codes), answer.speech))
        frames: Any = pipe.engine.scheduler._voices._frames
        waves = frames._waves._graphs
        assert (frames._by_size[1]._replay is not None) is (graphs == "on")
        assert (waves is not None) is (graphs == "on")
        streams = [pipe.stream(**ASKED, audio=tone(1), seed=seed) for seed in range(5)]
        together(*(stream.complete for stream in streams))
        assert [stream.result.speech_tokens for stream in streams] == [60] * 5 and free(pipe)
    (captured, spoken), (eager, expected) = found
    assert torch.equal(captured, eager)
    np.testing.assert_allclose(spoken, expected, atol=2e-2)


@pytest.mark.slow
def test_the_talkers_cache_is_packed(speaking, monkeypatch) -> None:
    brief(monkeypatch, 200)
    pipe = speaking.with_policy("compact")
    answer = pipe(**ASKED, images=noise(200, 200), seed=LONG)
    memory = answer.memory
    assert memory.tokens["speech"] > 100 and memory.by_kind["codes"] > 0
    assert memory.kv_bytes == sum(memory.by_modality.values()) == sum(memory.by_kind.values())
    speech = next(line for line in str(memory).split("\n") if line.startswith("speech"))
    assert float(speech.split()[-1].removesuffix("x")) > 1
    assert free(pipe)


@pytest.mark.daily("6")
@pytest.mark.parametrize("pieces", [1, 6])
def test_leaving_a_stream_frees_everything(speaking, monkeypatch, pieces: int) -> None:
    stream = speaking.stream(**ASKED, audio=tone(1), seed=LONG)
    spoken = stream.with_speech()
    for _ in range(pieces):
        next(spoken)
    stream.close()
    assert free(speaking)
    brief(monkeypatch, 8)
    assert len(speaking(**ASKED, seed=LONG).speech)


def test_coroutines_get_speech(speaking, monkeypatch) -> None:
    brief(monkeypatch, 10)

    async def read() -> list[Any]:
        stream = speaking.stream(**ASKED, seed=LONG)
        return [piece async for piece in stream.async_with_speech()]

    pieces = asyncio.run(read())
    assert sum(isinstance(piece, Speech) for piece in pieces) == 3


def test_speech_that_fails_ends_its_own_answer(speaking, monkeypatch) -> None:
    brief(monkeypatch, 8)

    def fails(*_: Any) -> None:
        raise RuntimeError("no breath")

    with monkeypatch.context() as patched:
        patched.setattr(OmniVoice, "prompt_tokens", property(fails))
        with pytest.raises(RuntimeError, match="no breath"):
            speaking(**ASKED, seed=LONG)
    with monkeypatch.context() as patched:
        patched.setattr(OmniVoice, "_opening", fails)
        with pytest.raises(RuntimeError, match="no breath"):
            speaking(**ASKED, seed=LONG)
        assert speaking(**ASKED | {"speak": False}).text
    assert free(speaking)
    with monkeypatch.context() as patched:
        patched.setattr(OmniFrames, "say", fails)
        with pytest.raises(RuntimeError, match="no breath"):
            speaking(**ASKED, seed=LONG)
    assert len(speaking(**ASKED, seed=LONG).speech) and free(speaking)


def test_a_step_that_fails_within_the_talker_ends_no_later_speech(speaking, monkeypatch) -> None:
    brief(monkeypatch, 8)

    def fails(_: Any, __: tuple, arguments: dict[str, Any]) -> None:
        if arguments["hidden_states"].shape[1] == 1:
            raise torch.OutOfMemoryError("no breath")

    layer = speaking.family.talker.model.model.layers[-1].self_attn
    hook = layer.register_forward_pre_hook(fails, with_kwargs=True)
    with pytest.raises(torch.OutOfMemoryError, match="no breath"):
        speaking(**ASKED, seed=LONG)
    hook.remove()
    assert speaking(**ASKED, seed=LONG).speech_tokens == 8 and free(speaking)


def test_speech_counts_toward_the_budget(speaking, monkeypatch) -> None:
    brief(monkeypatch, 30)
    how: dict[str, Any] = {"processor": speaking.processor, "policy": "bf16", "spill": False}
    model = speaking.family.outer_model
    small = OscarOmniPipeline(model, **how, kv_budget=100_000)
    assert small(**ASKED | {"speak": False}).text
    with pytest.raises(MemoryBusy, match="kv_budget is 100,000 bytes"):
        small(**ASKED, seed=LONG)
    rows, say = [], OmniFrames.say

    def note(self: Any, voices: Any) -> None:
        rows.append(len(voices))
        say(self, voices)

    monkeypatch.setattr(OmniFrames, "say", note)
    for budget, most in ((230_000, 1), (900_000, 2)):
        rows.clear()
        pipe = OscarOmniPipeline(model, **how, kv_budget=budget)
        streams = [pipe.stream(**ASKED, seed=LONG) for _ in range(2)]
        together(*(stream.complete for stream in streams))
        assert [stream.result.speech_tokens for stream in streams] == [30, 30]
        assert max(rows) == most and free(pipe)
    aloud = pipe.read_aloud("Read the text.", seed=LONG)
    pieces = aloud.with_speech()
    while not isinstance(next(pieces), Speech):
        pass
    budget = pipe.budget
    used, speech = pipe.engine.call(lambda: (budget.used_bytes, pipe.engine.speech_bytes))
    assert used == speech > 0


def test_a_request_that_waits_for_memory_begins_when_speech_ends(speaking, monkeypatch) -> None:
    """Although other speech goes on."""
    brief(monkeypatch, 120)
    short = property(lambda self: self.frames >= (10 if len(self.words) < 20 else 120))
    monkeypatch.setattr(OmniVoice, "is_said", short)
    how: dict[str, Any] = {"processor": speaking.processor, "policy": "bf16", "spill": False}
    pipe = OscarOmniPipeline(speaking.family.outer_model, **how, kv_budget=900_000)
    pieces = [pipe.read_aloud(text).with_speech() for text in ("Read this. " * 20, "Read this.")]
    for spoken in pieces:
        while not isinstance(next(spoken), Speech):
            pass
    budget = pipe.budget
    assert budget is not None
    budget.limit = pipe.engine.call(lambda: budget.taken_bytes) + 1000
    answer = pipe(prompt="What is it?", max_new_tokens=9)
    assert len(answer.token_ids) == 9 and pipe.engine.speech_bytes > 0
    assert sum(isinstance(piece, Speech) for piece in pieces[0]) > 10 and free(pipe)


def test_speech_waits_while_others_need_their_half(speaking, monkeypatch) -> None:
    """After a step that took long, the next one comes when as much time has passed, or at once if
    nobody else runs; only the first piece does not wait."""
    brief(monkeypatch, 30)
    voices, step = speaking.engine.scheduler._voices, Voices.step

    def takes_long(self: Voices, *, others: bool) -> bool:
        ended = step(self, others=others)
        self._seconds = 1e9
        return ended

    monkeypatch.setattr(Voices, "step", takes_long)
    monkeypatch.setattr(voices, "_ended_at", time.perf_counter())
    other = speaking.stream(**ASKED | {"speak": False, "max_new_tokens": 200})
    spoken = speaking.stream(**ASKED, seed=LONG)
    thread = threading.Thread(target=other.complete)
    next(other)
    thread.start()
    pieces = spoken.with_speech()
    waited = [thread.is_alive() for piece in pieces if isinstance(piece, Speech)]
    thread.join()
    assert waited[0] and not any(waited[1:]) and len(waited) > 2
