"""Qwen3-Omni's prompts and answers against plain transformers."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoProcessor, Qwen3OmniMoeForConditionalGeneration

from oscar_mm import OscarOmniPipeline
from oscar_mm.engine import layered_prefill
from oscar_mm.engine.device_timer import StepTimer
from oscar_mm.engine.prefill import read_prompt
from oscar_mm.engine.prompt import Prompt, remaining
from oscar_mm.media import load_video
from oscar_mm.media.encoder_inputs import scaled_inputs
from oscar_mm.media.media import Media
from oscar_mm.modality import Modality
from tests.engine.engine import made, run
from tests.engine.engine_waits import engine_waits
from tests.pipelines.conftest import NEVER
from tests.prompts import clip, noise, prepare, tone
from tests.recordings import write_movie

REQUESTS: dict[str, dict[str, list[Any]]] = {
    "text": {},
    "audio": {"audio": [tone(2.3)]},
    "image": {"images": [noise(64, 96)]},
    "two images": {"images": [noise(64, 64, 1), noise(120, 50, 2)]},
    "video": {"videos": [clip(6)]},
    "everything": {"audio": [tone(1.1)], "images": [noise(40, 90, 3)], "videos": [clip(4, 7)]},
}


class Plain:
    """The same checkpoint in plain transformers: one call of the processor, its own generate."""

    def __init__(self, folder: Path) -> None:
        self.processor = AutoProcessor.from_pretrained(folder)
        self.model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32
        ).eval()

    def inputs(self, prompt: str, media: Media) -> Any:
        """Return the processor's inputs; a video may have sound only if there is no recording."""
        parts = [{"type": medium.modality.label} for medium in media]
        turn = {"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}
        text = self.processor.apply_chat_template(
            [turn], add_generation_prompt=True, tokenize=False
        )
        arguments: dict[str, Any] = {"images": list(media.images)} if media.images else {}
        sounds = [audio.samples for audio in media.audio]
        for video in media.videos:
            arguments |= {
                "videos": [video.frames],
                "video_metadata": [video.metadata],
                "do_sample_frames": False,
                "cap_pixels_per_frame": False,
                "fps": video.fps,
            }
            if video.sound is not None:
                sounds = [video.sound.samples]
                if hasattr(self.processor, "load_audio_from_video"):
                    arguments |= {"load_audio_from_video": True, "audio_from_video_indices": [0]}
                else:
                    arguments["use_audio_in_video"] = True
        if sounds:
            arguments["audio"] = sounds
        inputs = self.processor(text=[text], return_tensors="pt", **arguments)
        return {name: value for name, value in inputs.items() if name != "mm_token_type_ids"}

    def answer(self, inputs: Any, **options: Any) -> list[int]:
        output = self.model.generate(
            **inputs,
            return_audio=False,
            thinker_max_new_tokens=16,
            thinker_eos_token_id=NEVER,
            thinker_do_sample=False,
            **options,
        )
        return output[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.fixture(scope="module")
def plain(qwen3_omni_folder) -> Plain:
    return Plain(qwen3_omni_folder)


@pytest.fixture(scope="module")
def movie(tmp_path_factory) -> Path:
    return write_movie(tmp_path_factory.mktemp("media") / "movie.mp4", clip(24, 30), tone(3.0))


def same_prompt(omni: OscarOmniPipeline, media: Media, inputs: Any) -> None:
    ours = scaled_inputs(omni.model, prepare(omni, "What is it?", media).inputs)
    for key in inputs.keys() - {"attention_mask"}:
        assert torch.allclose(ours[key].float(), torch.as_tensor(inputs[key]).float(), atol=1e-6)
    assert ours.keys() == inputs.keys() - {"attention_mask"}


@pytest.mark.daily("everything")
@pytest.mark.parametrize("name", REQUESTS)
def test_16_bit_cache_is_plain_transformers(omni, plain, name: str) -> None:
    media = omni.read_media(**REQUESTS[name])
    inputs = plain.inputs("What is it?", media)
    same_prompt(omni, media, inputs)
    answer = omni(prompt="What is it?", **REQUESTS[name], max_new_tokens=16)
    assert answer.token_ids == plain.answer(inputs)
    assert len(set(answer.token_ids)) > 3


def test_a_video_with_its_sound(omni, plain, movie) -> None:
    media = omni.read_media(videos=[movie], sound=True)
    [video] = media.videos
    assert video.sound.seconds == pytest.approx(3.0, abs=0.1)
    inputs = plain.inputs("What is it?", media)
    same_prompt(omni, media, inputs)
    heard = omni(prompt="What is it?", videos=[movie], use_audio_in_video=True, max_new_tokens=16)
    assert heard.token_ids == plain.answer(inputs, use_audio_in_video=True)
    silent = omni(prompt="What is it?", videos=movie, max_new_tokens=16)
    assert silent.memory.tokens["audio"] == 0 < silent.memory.tokens["video"]

    prompt = prepare(omni, "What is it?", media)
    [span] = prompt.media
    run = prompt.modalities[0, span.start : span.stop]
    assert span.modality is Modality.VIDEO and span.label == "movie.mp4"
    assert heard.memory.tokens["audio"] == int((run == 3).sum()) == pytest.approx(13 * 3, abs=2)
    # Frames and sound alternate by time, as positions say.
    assert int((run[1:] != run[:-1]).sum()) >= 3
    times = prompt.positions[1, 0, span.start : span.stop]
    assert bool((times[1:] >= times[:-1]).all())


def test_sound_stands_next_to_the_pictures_of_its_time(omni, plain, tmp_path) -> None:
    """Two seconds of pictures on a clock on which the sound begins after one second."""
    path = write_movie(tmp_path / "late.mkv", clip(32, 9), tone(3.0), late=1.0)
    media = omni.read_media(videos=[path], sound=True)
    [video] = media.videos
    assert video.fps == 2 and video.sound.seconds == pytest.approx(4.0, abs=0.1)
    assert not video.sound.samples[:15_000].any() and video.sound.samples[17_000:].any()
    same_prompt(omni, media, plain.inputs("What is it?", media))
    prompt = prepare(omni, "What is it?", media)
    [span] = prompt.media
    kinds = prompt.modalities[0, span.start : span.stop]
    times = prompt.positions[1, 0, span.start : span.stop]
    # 13 positions a second, of a pair of frames each second.
    pairs = times[kinds == int(Modality.VIDEO)].unique()
    assert (pairs - pairs[0]).tolist() == pytest.approx([0, 13, 26, 39])


def test_silent_videos_next_to_ones_with_sound(omni, movie, tmp_path) -> None:
    silent = write_movie(tmp_path / "silent.mp4", clip(16, 3), None)
    media = omni.read_media(videos=[silent, movie, clip(4)], audio=[tone(1)], sound=True)
    assert [video.sound is not None for video in media.videos] == [False, True, False]
    prompt = prepare(omni, "Compare.", media)
    sounds = [
        int((prompt.modalities[0, span.start : span.stop] == int(Modality.AUDIO)).sum())
        for span in prompt.media
    ]
    assert sounds[0] == sounds[2] == 0 and sounds[1] > 35 and sounds[3] == 13
    answer = omni(
        prompt="Compare.",
        videos=[silent, movie, clip(4)],
        audio=tone(1),
        use_audio_in_video=True,
        max_new_tokens=4,
    )
    assert answer.memory.tokens["audio"] == sum(sounds)


def test_a_medium_is_the_same_whatever_comes_with_it(omni) -> None:
    """Frame rates and lengths of other media leave a medium's features and positions alone."""
    slow = load_video(clip(6), fps=2)
    fast = load_video(clip(6), fps=6)
    alone = prepare(omni, "x", Media(videos=[fast]))
    both = prepare(omni, "x", Media(videos=[slow, fast]))
    first, second = both.media
    spread = [
        float(positions.max() - positions.min())
        for positions in (
            alone.positions[1, 0, alone.media[0].start : alone.media[0].stop],
            both.positions[1, 0, first.start : first.stop],
            both.positions[1, 0, second.start : second.stop],
        )
    ]
    assert spread == pytest.approx([2 * 13 / 3, 2 * 13, 2 * 13 / 3])

    short, long = tone(0.5), tone(4)
    one = prepare(omni, "x", omni.read_media(audio=[short])).inputs["input_features"]
    two = prepare(omni, "x", omni.read_media(audio=[long, short])).inputs["input_features"]
    assert torch.equal(two[1, :, : one.shape[2]], one[0])


SHORT, LONG = tone(0.37, 300.0), tone(2.3)
"""A recording under a second, which the tower by itself does not pad, and a longer one."""


def last_logits(pipe: OscarOmniPipeline, prompt: Prompt) -> torch.Tensor:
    """(rows, vocabulary) over a 16-bit cache of its own."""
    return read_prompt(pipe.model, prompt, pipe.new_cache(), pipe.prefill_chunk)


def heard(pipe: OscarOmniPipeline, *recordings: tuple[np.ndarray, int]) -> Prompt:
    return prepare(pipe, "What is it?", pipe.read_media(audio=list(recordings)))


def test_a_short_recording_alone_is_that_of_plain_transformers(omni, plain) -> None:
    inputs = plain.inputs("What is it?", omni.read_media(audio=[SHORT]))
    with torch.inference_mode():
        expected = plain.model.thinker(**inputs).logits[:, -1]
    assert (last_logits(omni, heard(omni, SHORT)) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("short_one", [0, 1])
def test_a_short_recording_is_the_same_next_to_a_long_one(omni, plain, short_one: int) -> None:
    """What the tower makes of it is what plain transformers makes of it alone."""
    recordings = [LONG, LONG, tone(0.62)]
    recordings.insert(short_one, SHORT)
    tower = plain.model.thinker.get_encoder(modality="audio")
    with torch.inference_mode():
        alone = []
        for one in recordings:
            inputs = heard(omni, one).inputs
            lengths = inputs["feature_attention_mask"].sum(-1)
            features = inputs["input_features"][0, :, : int(lengths)]
            alone.append(tower(features, feature_lens=lengths).last_hidden_state)
        inputs = heard(omni, *recordings).inputs
        media = {name: inputs[name] for name in ("input_features", "feature_attention_mask")}
        together = omni.model.get_audio_features(**media, return_dict=True).last_hidden_state
    expected = torch.cat(alone)
    assert together.shape == expected.shape and expected.abs().max() > 0.1
    assert (together - expected).abs().max() < 1e-6


def test_a_short_recording_is_the_same_in_a_batch(omni) -> None:
    prompts = [heard(omni, SHORT), heard(omni, LONG), heard(omni, SHORT, LONG)]
    single = torch.cat([last_logits(omni, prompt) for prompt in prompts])
    with engine_waits(omni):
        caches = [omni.new_cache() for _ in prompts]
        together = torch.cat(omni.engine.reader.prefill_batch(prompts, caches))
    assert (together - single).abs().max() < 1e-5


def test_a_short_recording_is_the_same_in_chunks_and_after_a_prefix(omni) -> None:
    whole = last_logits(omni, heard(omni, LONG, SHORT))
    model, options = omni.family.outer_model, {"processor": omni.processor, "policy": "bf16"}
    chunked = OscarOmniPipeline(model, prefill_chunk=16, **options)
    assert (last_logits(chunked, heard(omni, LONG, SHORT)) - whole).abs().max() < 1e-5
    keeping = OscarOmniPipeline(model, prefix_cache="1GB", **options)
    with keeping.chat() as chat:
        chat.ask("What is it?", audio=[LONG], max_new_tokens=1)
    prompt = heard(omni, LONG, SHORT)
    past = keeping.prefixes.find(prompt, keeping.engine.scheduler._reader_state(prompt)).cache
    known = past.get_seq_length()
    assert known >= prompt.media[0].stop
    after = read_prompt(omni.model, remaining(prompt, known), past)
    assert (after - whole).abs().max() < 1e-5


def test_logits_of_the_last_token_only(omni) -> None:
    prompt = prepare(omni, "What is it?", omni.read_media(audio=[tone(1)]))
    arguments = {**prompt.inputs, "position_ids": prompt.positions, "use_cache": False}
    sizes = []
    hook = omni.model.lm_head.register_forward_hook(lambda *a: sizes.append(a[2].shape[1]))
    with torch.inference_mode():
        whole = omni.model(**arguments).logits
        last = omni.model(**arguments, logits_to_keep=1).logits
        with pytest.raises(AttributeError):
            omni.model(**arguments, pixel_values="no pixels", logits_to_keep=1)
        again = omni.model(**arguments).logits
    hook.remove()
    assert sizes == [prompt.tokens, 1, prompt.tokens]
    assert torch.allclose(whole[:, -1:], last, atol=1e-5) and torch.equal(whole, again)


def test_logits_of_the_last_token_only_while_others_decode(
    omni, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layered_prefill, "_PATIENCE_S", 0.0)
    first, second = made(omni, "What is it?", max_new_tokens=60), made(omni, "Why?" * 20)
    sizes, during = [], []

    def layer_begins(*_: Any) -> None:
        omni.engine.scheduler._batches.pace = StepTimer()  # A step comes after each layer.
        during.append(len(first.tokens))

    layers = omni.model.get_decoder().layers
    hooks = [layer.register_forward_pre_hook(layer_begins) for layer in layers]
    # With a hook, the model itself makes the steps.
    hooks += [omni.model.lm_head.register_forward_hook(lambda *a: sizes.append(a[2].shape[1]))]
    omni.engine.submit(first)
    omni.engine.run_until(lambda: len(first.tokens) > 3)
    during.clear()
    omni.engine.submit(second)
    omni.engine.run_until(lambda: bool(second.tokens))
    for hook in hooks:
        hook.remove()
    first.cancel()
    run(omni, [first, second])
    assert max(during) > min(during), "no step between the layers"
    assert set(sizes) == {1}


def test_chunks_are_exact_in_16_bit(omni) -> None:
    chunked = OscarOmniPipeline(
        omni.family.outer_model, processor=omni.processor, policy="bf16", prefill_chunk=33
    )
    expected = omni(prompt="What is it?", **REQUESTS["everything"], max_new_tokens=12).token_ids
    answer = chunked(prompt="What is it?", **REQUESTS["everything"], max_new_tokens=12)
    assert answer.token_ids == expected


def test_end_tokens(omni, speaking, monkeypatch) -> None:
    thinker, whole = omni.model.generation_config, omni.family.outer_model.generation_config
    tokenizer = omni.processor.tokenizer
    monkeypatch.setattr(thinker, "eos_token_id", None)
    assert omni.family.end_tokens() == {tokenizer.eos_token_id}
    monkeypatch.setattr(whole, "eos_token_id", [3, 4])
    assert omni.family.end_tokens() == {3, 4}
    monkeypatch.setattr(whole, "eos_token_id", None)
    assert omni.family.end_tokens() == {tokenizer.eos_token_id}
    monkeypatch.setattr(thinker, "eos_token_id", 5)
    assert omni.family.end_tokens() == {5}


def test_audio_tokens_are_announced(omni) -> None:
    media = omni.read_media(audio=[tone(0.4), tone(3.9)], images=[noise(64, 64)])
    least = [omni.family.min_tokens(medium) for medium in media]
    spans = prepare(omni, "What?", media).media
    assert least == [span.tokens for span in spans] == [4, 5, 51]


def test_a_checkpoint_that_opens_its_reasoning_itself_has_tokens_for_it(omni, speaking) -> None:
    for pipe, longest in ((omni, 256 + 8192), (speaking, 256)):
        processor = copy.deepcopy(pipe.processor)
        assert (
            OscarOmniPipeline(pipe.family.outer_model, processor=processor).longest_answer() == 256
        )
        processor.tokenizer.add_tokens(["<think>", "</think>"])
        processor.chat_template += "{# Of earlier answers what comes after </think>. #}"
        thinking = OscarOmniPipeline(pipe.family.outer_model, processor=processor)
        assert thinking.longest_answer() == longest
