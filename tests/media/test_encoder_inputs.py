"""Pixels and samples that wait: what a model makes of them is what the processor would make."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, Qwen2VLImageProcessor, WhisperFeatureExtractor

from oscar_mm import OscarOmniPipeline, OscarVLPipeline
from oscar_mm.engine.prompt import Prompt, beginning, remaining, segments
from oscar_mm.media import encoder_inputs
from oscar_mm.media.encoder_inputs import (
    SAMPLES,
    DeferredFeatures,
    PixelScale,
    as_samples,
    in_bytes,
    scale_in_model,
    with_features,
)
from oscar_mm.pipelines.families.qwen3_omni_talker import Qwen3OmniTalker
from tests.prompts import clip, noise, prepare, tone
from tests.recordings import write_movie

SIZES = ((90, 120), (64, 64), (300, 40), (64, 64), (257, 129), (33, 31))


class Model(torch.nn.Module):
    """Returns the pixels that it is given."""

    def forward(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return inputs


@pytest.fixture
def processor(qwen3_vl_folder) -> Any:
    return AutoProcessor.from_pretrained(qwen3_vl_folder)


@pytest.mark.parametrize("batch", [1, 20_000, 1 << 21])
def test_pictures(processor, monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    monkeypatch.setattr(encoder_inputs, "_BATCH_PIXELS", batch)
    model = Model()
    scale_in_model(model, processor)
    images = [Image.fromarray(noise(*size)) for size in SIZES]
    found = in_bytes(processor, model).image_processor(images, return_tensors="pt")
    expected = processor.image_processor(images, return_tensors="pt")
    assert torch.equal(found["image_grid_thw"], expected["image_grid_thw"])
    assert found["pixel_values"].dtype == torch.uint8
    assert 8 * found["pixel_values"].nbytes == expected["pixel_values"].nbytes
    assert torch.equal(model(**found)["pixel_values"], expected["pixel_values"])


def test_videos(processor) -> None:
    model = Model()
    scale_in_model(model, processor)
    arguments = {"do_sample_frames": False, "cap_pixels_per_frame": False, "return_tensors": "pt"}
    found = in_bytes(processor, model).video_processor([clip(5)], **arguments)
    expected = processor.video_processor([clip(5)], **arguments)
    assert found["pixel_values_videos"].dtype == torch.uint8
    assert torch.equal(found["video_grid_thw"], expected["video_grid_thw"])
    given = model(pixel_values_videos=found["pixel_values_videos"])
    assert torch.equal(given["pixel_values_videos"], expected["pixel_values_videos"])


def test_the_model_scales_as_it_reads(qwen3_vl_folder) -> None:
    pipe = OscarVLPipeline(qwen3_vl_folder, device="cpu")
    images = [Image.fromarray(noise(*size)) for size in SIZES]
    seen: list[torch.Tensor] = []
    tower = pipe.model.get_encoder(modality="image")
    hook = tower.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    pipe(images, "What is it?", max_new_tokens=1)
    hook.remove()
    expected = pipe.processor.image_processor(images, return_tensors="pt")["pixel_values"]
    assert torch.equal(torch.cat(seen), expected)


def test_other_processors_keep_their_pixels(processor) -> None:
    model = Model()
    scale_in_model(model, processor)
    kept = processor.image_processor
    assert in_bytes(processor, model).image_processor is not kept
    for name, value in (("image_mean", [0.4, 0.5, 0.5]), ("do_normalize", False)):
        before = getattr(kept, name)
        setattr(kept, name, value)
        assert in_bytes(processor, model).image_processor is kept, name
        setattr(kept, name, before)
    assert PixelScale.of(SimpleNamespace(backend="pil")) is None
    # Of the first processor.
    scale_in_model(model, SimpleNamespace(image_processor=None, video_processor=None))
    assert len(model._forward_pre_hooks) == 1


@pytest.mark.gpu
def test_a_gpu_scales_as_a_cpu() -> None:
    processor = Qwen2VLImageProcessor(patch_size=16, merge_size=2)
    scale = PixelScale.of(processor)
    assert scale is not None
    patches = torch.randint(0, 256, (640, 768), dtype=torch.uint8)
    found, expected = scale.scaled(processor, patches.cuda()), scale.scaled(processor, patches)
    assert found.is_cuda
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-6)


def test_a_mean_for_all_channels_is_left_to_the_processor(processor) -> None:
    assert PixelScale.of(processor.image_processor) is not None
    processor.image_processor.image_mean = 0.5
    assert PixelScale.of(processor.image_processor) is None


LENGTHS = (0.37, 2.0, 1.2345, 5.0)
FEATURES = ("input_features", "feature_attention_mask")


@pytest.fixture
def omni(qwen3_omni_talker_folder) -> OscarOmniPipeline:
    return OscarOmniPipeline(qwen3_omni_talker_folder, device="cpu", policy="bf16")


@pytest.fixture
def on_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Towers on the CPU make features, too."""
    monkeypatch.setattr(encoder_inputs, "tower_device", lambda _: torch.device("cpu"))


def heard(pipe: OscarOmniPipeline, *lengths: float, **media: Any) -> Prompt:
    return prepare(pipe, "Who?", pipe.read_media(audio=[*map(tone, lengths)], **media))


def test_a_cpu_makes_features_before(omni) -> None:
    assert set(FEATURES) < set(heard(omni, 1.0).inputs)


def test_the_model_makes_the_features_of_the_processor(omni, monkeypatch) -> None:
    expected = heard(omni, *LENGTHS, images=[noise(64, 96)])
    monkeypatch.setattr(encoder_inputs, "tower_device", lambda _: torch.device("cpu"))
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
    for cut in (parts, [*segments(prompt, 20)], [omni.family.concatenate(parts)]):
        made = [with_features(omni.model, part.inputs) for part in cut]
        joined = [
            omni.family.join_media(name, [one[name] for one in made if name in one])
            for name in FEATURES
        ]
        assert all(
            torch.equal(one, whole[name]) for one, name in zip(joined, FEATURES, strict=True)
        )


def test_answers_are_the_same(omni, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(Qwen3OmniTalker, "max_frames", 20)
    movie = write_movie(tmp_path / "m.mp4", clip(16, 3), tone(2))
    requests: list[dict[str, Any]] = [
        {"audio": [tone(2.3), tone(0.4)], "images": noise(64, 64)},
        {"videos": [movie, clip(4)], "audio": tone(1.01), "use_audio_in_video": True},
        {"audio": tone(1), "speak": True, "seed": 1},
    ]

    def answers() -> list[Any]:
        chat = omni.chat()
        turns = [chat.ask("What?", audio=tone(length), max_new_tokens=4) for length in (1, 0.5)]
        calls = [omni(prompt="What is it?", **request, max_new_tokens=6) for request in requests]
        return [*turns, *calls]

    before = answers()
    monkeypatch.setattr(encoder_inputs, "tower_device", lambda _: torch.device("cpu"))
    for found, expected in zip(answers(), before, strict=True):
        assert found.token_ids == expected.token_ids
        if expected.speech is not None:
            assert np.array_equal(found.speech, expected.speech)


@pytest.mark.usefixtures("on_tower")
def test_features_are_made_before_where_they_must(omni, monkeypatch) -> None:
    monkeypatch.setattr(encoder_inputs, "_MAX_SAMPLES", 16_000)
    assert SAMPLES in heard(omni, 1.0, 0.5).inputs
    assert SAMPLES not in heard(omni, 0.5, 1.1).inputs  # longer than a GPU makes features of
    with monkeypatch.context() as other_version:
        other_version.setattr(encoder_inputs, "_EXTRACT", "_a_method_of_another_name")
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
        inputs = DeferredFeatures(extractor)([recording], **options)
        inputs["feature_attention_mask"] = inputs.pop("attention_mask")
        monkeypatch.setattr(omni.model, "_oscar_extractor", extractor)
        expected = with_features(omni.model, as_samples(dict(inputs)))
        monkeypatch.setattr(encoder_inputs, "tower_device", lambda _: torch.device("cuda:0"))
        found = with_features(omni.model, as_samples(dict(inputs)))
        monkeypatch.undo()
        assert all(tensor.is_cuda for tensor in found.values())
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name].cpu(), tensor, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_memory_for_features_is_less_than_the_tower_takes(omni, monkeypatch) -> None:
    monkeypatch.setattr(omni.model, "_oscar_extractor", WhisperFeatureExtractor(128))
    monkeypatch.setattr(encoder_inputs, "tower_device", lambda _: torch.device("cuda:0"))
    seconds = 600
    recording = torch.rand(seconds * 16_000)
    with_features(omni.model, {SAMPLES: [recording[:1600]]})
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with_features(omni.model, {SAMPLES: [recording]})
    assert torch.cuda.max_memory_allocated() - before < 2.5e9 * seconds / 3600


@pytest.mark.gpu
@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="others take the GPU's memory too")
def test_recordings_of_many_lengths_leave_no_memory_behind(omni, monkeypatch) -> None:
    """The Fourier transform keeps a plan for each."""
    monkeypatch.setattr(omni.model, "_oscar_extractor", WhisperFeatureExtractor(128))
    monkeypatch.setattr(encoder_inputs, "tower_device", lambda _: torch.device("cuda:0"))
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
    found, expected = (pipe(prompt="Who?", audio=audio, max_new_tokens=8) for pipe in (gpu, cpu))
    assert found.token_ids == expected.token_ids
