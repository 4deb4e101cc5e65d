"""OscarOmniPipeline: forms of recordings, streams, speech, and requests that cannot be."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oscar_mm import InputError, OscarOmniPipeline
from oscar_mm.media import MediaLimits
from tests.prompts import clip, noise, tone
from tests.recordings import write_movie, write_sound

pytestmark = pytest.mark.usefixtures("brief")


def refused(pipe: OscarOmniPipeline, *words: str, **request: Any) -> None:
    request = {"prompt": "What is it?"} | request
    for ask in (pipe, pipe.stream):
        with pytest.raises(InputError) as caught:
            ask(**request)
        message = str(caught.value)
        assert "\n" not in message and len(message) < 700
        for word in words:
            assert re.search(word, message), (word, message)


def tokens(pipe: OscarOmniPipeline, audio: Any, **options: Any) -> list[int]:
    return pipe(prompt="What is it?", audio=audio, max_new_tokens=10, **options).token_ids


def test_every_form_of_a_recording(omni, tmp_path: Path) -> None:
    samples, rate = tone(1.5)
    path = write_sound(tmp_path / "a tone.wav", (samples, rate), rate=16_000, layout="mono")
    whole = (samples * 32768).round().clip(-32768, 32767).astype(np.int16)
    expected = tokens(omni, (whole, rate))
    forms = [path, str(path), path.read_bytes(), (rate, whole), (whole[:, None], rate)]
    for form in forms:
        assert tokens(omni, form) == tokens(omni, [form]) == expected
    assert tokens(omni, [path, path]) != expected
    assert tokens(omni, (tone(3.0, 900)[0], rate)) != expected


def test_stream_is_the_answer(omni) -> None:
    stream = omni.stream(
        prompt="What is it?", audio=tone(1), images=noise(64, 64), max_new_tokens=16
    )
    pieces = list(stream)
    assert len(pieces) > 2 and "".join(pieces) == stream.result.text
    answer = omni(prompt="What is it?", audio=tone(1), images=noise(64, 64), max_new_tokens=16)
    assert answer.token_ids == stream.result.token_ids
    assert answer.speech is None and answer.sample_rate is None


@pytest.mark.parametrize("policy", ["standard", "oscar"])
def test_packed_answers(omni, policy: str) -> None:
    pipe = OscarOmniPipeline(omni.family.outer_model, processor=omni.processor, policy=policy)
    answer = pipe(prompt="What is said?", audio=tone(20), images=noise(200, 200), max_new_tokens=12)
    assert len(answer.token_ids) == 12
    assert answer.memory.tokens["audio"] == 20 * 13
    assert answer.memory.by_modality["audio"] > 0
    again = pipe(prompt="What is said?", audio=tone(20), images=noise(200, 200), max_new_tokens=12)
    assert again.token_ids == answer.token_ids


def test_16_bit_weights(qwen3_omni_talker_folder) -> None:
    pipe = OscarOmniPipeline(qwen3_omni_talker_folder, device="cpu", dtype="bfloat16")
    answer = pipe(
        prompt="What?",
        audio=tone(1),
        images=noise(64, 64),
        videos=clip(4),
        max_new_tokens=2,
        speak=True,
        seed=0,
    )
    assert len(answer.token_ids) == 2 and answer.speech.dtype == np.float32


def test_speech(speaking) -> None:
    request = {"audio": tone(1), "images": noise(64, 64), "max_new_tokens": 8}
    text = speaking(prompt="What is it?", **request)
    sizes = []
    head = speaking.model.lm_head
    hook = head.register_forward_hook(lambda _, __, logits: sizes.append(logits.shape[1]))
    spoken = speaking(prompt="What is it?", **request, speak=True, seed=1)
    hook.remove()
    assert set(sizes) == {1}
    assert spoken.token_ids == text.token_ids and spoken.text == text.text
    heard = spoken.memory.tokens.pop("speech")
    assert heard > spoken.speech_tokens > 0 and spoken.memory.tokens == text.memory.tokens
    assert (
        spoken.memory.kv_bytes
        == text.memory.kv_bytes
        + (spoken.memory.by_modality["speech"] + spoken.memory.by_modality["shared"])
        - text.memory.by_modality["shared"]
    )
    assert spoken.finish_reason == "length" and spoken.prompt_tokens == text.prompt_tokens
    assert spoken.timings.prefill_s > 0 and spoken.timings.decode_s > 0
    speech = spoken.speech
    assert speech.dtype == np.float32 and speech.ndim == 1 and len(speech) > 0
    assert np.isfinite(speech).all() and 0 < np.abs(speech).max() <= 1
    assert spoken.sample_rate == 24_000
    again = speaking(prompt="What is it?", **request, speak=True, seed=1)
    assert np.array_equal(again.speech, speech)
    state = torch.random.get_rng_state()
    other = speaking(prompt="What is it?", **request, speak=True, seed=3, speaker="CHELSIE")
    assert len(other.speech) != len(speech) or not np.array_equal(other.speech, speech)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_speech_about_recordings_that_the_tower_reads_apart(speaking) -> None:
    """One of less than a second, and a longer one."""
    recordings = [tone(1.3), tone(0.2)]
    answer = speaking(prompt="What is it?", audio=recordings, max_new_tokens=5, speak=True, seed=0)
    expected = speaking(prompt="What is it?", audio=recordings, max_new_tokens=5, seed=0)
    assert answer.token_ids == expected.token_ids
    assert answer.speech is not None and len(answer.speech)


def test_speech_about_a_video_with_its_sound(speaking, tmp_path) -> None:
    movie = write_movie(tmp_path / "movie.mp4", clip(16), tone(2))
    stream = speaking.stream(
        prompt="What?", videos=movie, use_audio_in_video=True, speak=True, seed=1, max_new_tokens=5
    )
    assert "".join(stream) == stream.result.text
    assert len(stream.result.speech) > 0
    plain = speaking(prompt="What?", videos=movie, use_audio_in_video=True, max_new_tokens=5)
    assert stream.result.token_ids == plain.token_ids


def test_speech_ends_with_the_answer(speaking, monkeypatch) -> None:
    first = speaking(prompt="What is it?", audio=tone(1), max_new_tokens=8).token_ids
    end = next(token for token in first[3:] if token not in first[:3])
    monkeypatch.setattr(speaking.model.generation_config, "eos_token_id", end)
    answer = speaking(prompt="What is it?", audio=tone(1), max_new_tokens=8, speak=True, seed=0)
    assert answer.token_ids == first[: first.index(end)]
    assert answer.finish_reason == "stop" and len(answer.speech) > 0
    monkeypatch.setattr(speaking.model.generation_config, "eos_token_id", first[0])
    silent = speaking(prompt="What is it?", audio=tone(1), max_new_tokens=8, speak=True, seed=0)
    assert (silent.text, silent.token_ids, len(silent.speech)) == ("", [], 0)
    assert silent.finish_reason == "stop"


def test_speech_is_sampled_as_configured(speaking, monkeypatch) -> None:
    monkeypatch.setattr(speaking.model.generation_config, "repetition_penalty", 5.0)
    greedy = speaking(prompt="What is it?", audio=tone(1), max_new_tokens=8).token_ids
    spoken = speaking(prompt="What is it?", audio=tone(1), max_new_tokens=8, speak=True, seed=0)
    assert spoken.token_ids == greedy
    options = {"temperature": 1.5, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.2}
    drawn = [
        speaking(
            prompt="What is it?", audio=tone(1), max_new_tokens=8, speak=True, seed=seed, **options
        )
        for seed in (3, 3, 5)
    ]
    assert drawn[0].token_ids == drawn[1].token_ids != drawn[2].token_ids


def test_images_come_first_and_the_prompt_second(omni) -> None:
    """As in the other pipelines."""
    picture, how = noise(64, 64), {"max_new_tokens": 4}
    expected = omni(images=[picture], prompt="What?", audio=tone(1), **how).token_ids
    assert omni([picture], "What?", audio=tone(1), **how).token_ids == expected
    assert "".join(omni.stream([picture], "What?", audio=tone(1), **how))
    for arguments, more in (
        (("What is it?",), {}),
        (("What is it?",), {"audio": tone(1)}),
        (("What is it?", tone(1)), {}),
        (("What is it?", None, [picture]), {}),
    ):
        for call in (omni, omni.stream):
            with pytest.raises((InputError, TypeError)) as caught:
                call(*arguments, **more)
            expected = "the first argument is images" if len(arguments) < 3 else "posit"
            assert expected in str(caught.value)


def test_speech_that_cannot_be(omni, speaking) -> None:
    refused(omni, "speech: ", "no talker", speak=True)
    refused(speaking, "speaker 'Bob'", "ethan, chelsie", speak=True, speaker="Bob")
    refused(speaking, "stop cannot be used with speak", speak=True, stop="x")
    refused(omni, "speaker requires speak=True", speaker="ethan")


def test_bad_recordings(omni, tmp_path: Path) -> None:
    samples, rate = tone(1)
    silent = write_movie(tmp_path / "silent.mp4", clip(8), None)
    broken = samples.copy()
    broken[500] = np.nan
    refused(omni, "gone.wav", "no such file", audio="gone.wav")
    refused(omni, r"audio\[1\]", "NaN", audio=[(samples, rate), (broken, rate)])
    refused(omni, "no samples", audio=(samples[:0], rate))
    refused(omni, "silent.mp4", "no audio track", audio=silent)
    refused(omni, "needs a rate", audio=samples)
    refused(omni, r"audio\[0\]", "int is not a recording", audio=5)
    refused(omni, "remote media are disabled", audio="https://example.org/a.wav")


def test_too_long(omni) -> None:
    short = OscarOmniPipeline(omni.family.outer_model, processor=omni.processor, max_context=100)
    refused(
        *(short, r"audio\[0\]: 117", "over the context, but only 100 fit", "shorter recordings"),
        audio=tone(9),
        max_new_tokens=1,
    )
    limits = MediaLimits(max_audio_seconds=2)
    bounded = OscarOmniPipeline(omni.family.outer_model, processor=omni.processor, limits=limits)
    refused(bounded, r"audio\[0\]: lasts 3.0 s", "max_audio_seconds", audio=tone(3))


def test_bad_text_and_arguments(omni) -> None:
    refused(omni, "prompt is empty", prompt=" ")
    refused(omni, r"<\|audio_pad\|>", "control token", prompt="<|audio_pad|>")
    refused(omni, "unknown argument sound", "images, prompt, videos, audio", sound=tone(1))
    refused(omni, "max_new_tokens", max_new_tokens=0)


def test_a_loaded_model_and_its_towers(omni, qwen3_omni_folder) -> None:
    pipe = OscarOmniPipeline(qwen3_omni_folder, device="cpu", attn_implementation="eager")
    config = pipe.model.config
    assert config.vision_config._attn_implementation == "eager"
    assert config.audio_config._attn_implementation == "eager"
    assert config.text_config._attn_implementation == "oscar"
    assert omni.model.config.text_config._attn_implementation == "oscar"
    assert omni.model.config.audio_config._attn_implementation == "sdpa"
    assert pipe.model is pipe.family.outer_model.thinker
    assert pipe.max_context == 65536
