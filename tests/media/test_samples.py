"""Samples that wait: the features that a model makes of them are those of the processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor

from oscar_mm import OscarOmniPipeline
from oscar_mm.generation.prompt import Prompt, beginning, remaining, segments
from oscar_mm.media import samples
from oscar_mm.media.samples import SAMPLES, UnmadeFeatures, as_samples, with_features
from tests.prompts import clip, noise, tone
from tests.recordings import write_movie

LENGTHS = (0.37, 2.0, 1.2345, 5.0)
FEATURES = ("input_features", "feature_attention_mask")


@pytest.fixture
def omni(qwen3_omni_talker_folder) -> OscarOmniPipeline:
    return OscarOmniPipeline(qwen3_omni_talker_folder, device="cpu", policy="bf16")


@pytest.fixture
def on_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Towers on the CPU make features, too."""
    monkeypatch.setattr(samples, "tower_device", lambda _: torch.device("cpu"))


def heard(pipe: OscarOmniPipeline, *lengths: float, **media: Any) -> Prompt:
    return pipe.prepare("Who?", pipe.read_media(audio=[*map(tone, lengths)], **media), None)


def test_a_cpu_makes_features_before(omni) -> None:
    assert set(FEATURES) < set(heard(omni, 1.0).inputs)


def test_the_model_makes_the_features_of_the_processor(omni, monkeypatch) -> None:
    expected = heard(omni, *LENGTHS, images=[noise(64, 96)])
    monkeypatch.setattr(samples, "tower_device", lambda _: torch.device("cpu"))
    prompt = heard(omni, *LENGTHS, images=[noise(64, 96)])
    assert [len(x) for x in prompt.inputs[SAMPLES]] == [round(16_000 * x) for x in LENGTHS]
    assert not set(FEATURES) & set(prompt.inputs)
    found = with_features(omni.model, prompt.inputs)
    assert set(found) == set(expected.inputs)
    for name, tensor in expected.inputs.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype, name
    assert torch.equal(prompt.positions, expected.positions)
    assert prompt.media == expected.media and "images[0]" in str(prompt.media)


@pytest.mark.usefixtures("on_tower")
def test_parts_of_a_prompt_have_samples_of_their_own(omni) -> None:
    prompt = heard(omni, *LENGTHS)
    whole = with_features(omni.model, prompt.inputs)
    second = prompt.media[1].stop
    parts = [beginning(prompt, second), remaining(prompt, second)]
    assert [len(part.inputs[SAMPLES]) for part in parts] == [2, 2]
    for cut in (parts, [*segments(prompt, 20)], [omni.family.in_line(parts)]):
        made = [with_features(omni.model, part.inputs) for part in cut]
        joined = [
            omni.family.join_media(name, [one[name] for one in made if name in one])
            for name in FEATURES
        ]
        assert all(
            torch.equal(one, whole[name]) for one, name in zip(joined, FEATURES, strict=True)
        )


def test_answers_are_the_same(omni, tmp_path: Path, monkeypatch) -> None:
    movie = write_movie(tmp_path / "m.mp4", clip(16, 3), tone(2))
    requests: list[dict[str, Any]] = [
        {"audio": [tone(2.3), tone(0.4)], "images": noise(64, 64)},
        {"videos": [movie, clip(4)], "audio": tone(1.01), "use_audio_in_video": True},
        {"audio": tone(1), "speak": True, "seed": 1},
    ]

    def answers() -> list[Any]:
        chat = omni.chat()
        turns = [chat.ask("What?", audio=tone(length), max_new_tokens=4) for length in (1, 0.5)]
        calls = [omni("What is it?", **request, max_new_tokens=6) for request in requests]
        return [*turns, *calls]

    before = answers()
    monkeypatch.setattr(samples, "tower_device", lambda _: torch.device("cpu"))
    for found, expected in zip(answers(), before, strict=True):
        assert found.token_ids == expected.token_ids
        if expected.speech is not None:
            assert np.array_equal(found.speech, expected.speech)


@pytest.mark.usefixtures("on_tower")
def test_features_are_made_before_where_they_must(omni, monkeypatch) -> None:
    monkeypatch.setattr(samples, "_MOST_SAMPLES", 16_000)
    assert SAMPLES in heard(omni, 1.0, 0.5).inputs
    assert SAMPLES not in heard(omni, 0.5, 1.1).inputs  # longer than a GPU makes features of
    with monkeypatch.context() as other_version:
        other_version.setattr(samples, "_EXTRACT", "_a_method_of_another_name")
        assert SAMPLES not in heard(omni, 0.5).inputs
    assert SAMPLES in heard(omni, 0.5).inputs
    model, own = omni.family.outer_model, omni.processor
    own.feature_extractor = WhisperFeatureExtractor(32, return_attention_mask=True)
    assert SAMPLES not in heard(OscarOmniPipeline(model, processor=own), 0.5).inputs


@pytest.mark.gpu
def test_a_gpu_makes_the_features_of_a_cpu(omni, monkeypatch) -> None:
    extractor = WhisperFeatureExtractor(128, return_attention_mask=True)
    recordings = [tone(seconds)[0] for seconds in (*LENGTHS, 61.003)]
    silence = np.zeros(16_000, np.float32)
    for recording in (*recordings, silence):
        options = {"sampling_rate": 16_000, "padding": True, "return_tensors": "pt"}
        inputs = UnmadeFeatures(extractor)([recording], **options)
        inputs["feature_attention_mask"] = inputs.pop("attention_mask")
        monkeypatch.setattr(omni.model, "_oscar_extractor", extractor)
        expected = with_features(omni.model, as_samples(dict(inputs)))
        monkeypatch.setattr(samples, "tower_device", lambda _: torch.device("cuda:0"))
        found = with_features(omni.model, as_samples(dict(inputs)))
        monkeypatch.undo()
        assert all(tensor.is_cuda for tensor in found.values())
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name].cpu(), tensor, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_memory_for_features_is_less_than_the_tower_takes(omni, monkeypatch) -> None:
    monkeypatch.setattr(omni.model, "_oscar_extractor", WhisperFeatureExtractor(128))
    monkeypatch.setattr(samples, "tower_device", lambda _: torch.device("cuda:0"))
    seconds = 600
    recording = torch.rand(seconds * 16_000)
    with_features(omni.model, {SAMPLES: [recording[:1600]]})
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with_features(omni.model, {SAMPLES: [recording]})
    assert torch.cuda.max_memory_allocated() - before < 2.5e9 * seconds / 3600


@pytest.mark.gpu
def test_recordings_of_many_lengths_leave_no_memory_behind(omni, monkeypatch) -> None:
    """The Fourier transform keeps a plan for each."""
    monkeypatch.setattr(omni.model, "_oscar_extractor", WhisperFeatureExtractor(128))
    monkeypatch.setattr(samples, "tower_device", lambda _: torch.device("cuda:0"))
    recording = torch.rand(60 * 16_000)

    def free(lengths: range) -> int:
        for length in lengths:
            with_features(omni.model, {SAMPLES: [recording[:length]]})
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    before = free(range(16_000, 16_800, 160))
    assert before - free(range(400_000, 480_000, 160)) < 64e6


@pytest.mark.gpu
def test_a_tower_on_a_gpu_makes_them(qwen3_omni_folder) -> None:
    cpu, gpu = (
        OscarOmniPipeline(qwen3_omni_folder, device=device, dtype="float32", policy="bf16")
        for device in ("cpu", "cuda:0")
    )
    assert SAMPLES in heard(gpu, 1.0).inputs and SAMPLES not in heard(cpu, 1.0).inputs
    audio = [tone(seconds) for seconds in LENGTHS]
    found, expected = (pipe("Who?", audio, max_new_tokens=8) for pipe in (gpu, cpu))
    assert found.token_ids == expected.token_ids
