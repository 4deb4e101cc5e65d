"""Prompts embedded part by part equal what the model computes at once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oscar_mm import OscarCache, OscarVLPipeline
from oscar_mm.cache.cache import as_argument, cache_of
from oscar_mm.engine import prefill as prefill_module
from oscar_mm.engine.prefill import embedded_parts, joined, length, prefill, read_prompt, sliced
from oscar_mm.engine.prompt import Prompt, by_frames, segments
from oscar_mm.pipelines.pipeline import Pipeline
from tests.engine.pipelines import pipelines
from tests.prompts import clip, noise, prepare
from tests.recordings import write_movie

PICTURES = [noise(96, 70), noise(250, 120, 2), noise(64, 64, 3)]
NAMES = ["qwen", "moe", "omni", "llava"]


@pytest.fixture(scope="module")
def pipes(folders: dict[str, Path]) -> dict[str, Pipeline]:
    return pipelines(folders, "bf16")


def prompt_of(pipe: Pipeline, text: str = "What is it? " * 9) -> Prompt:
    shown: dict[str, Any] = {"images": PICTURES}
    if pipe.family.name != "LLaVA-NeXT":
        shown["videos"] = [clip(6), clip(4, 9)]
    if pipe.family.name == "Qwen3-Omni":
        samples = np.random.default_rng(0).standard_normal(40000).astype(np.float32) / 10
        shown["audio"] = [(samples, 16000), (samples[:20000], 16000)]
    return prepare(pipe, text, pipe.read_media(**shown))


def at_once(pipe: Pipeline, prompt: Prompt) -> torch.Tensor:
    with torch.inference_mode():
        return pipe.model(**prompt.inputs, position_ids=prompt.positions).logits[:, -1]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_parts_are_those_of_the_whole(pipes: dict[str, Pipeline], name: str) -> None:
    pipe, cache = pipes[name], OscarCache("bf16")
    prompt = prompt_of(pipe)
    with torch.inference_mode():
        [whole] = embedded_parts(pipe.model, prompt, cache, prompt.tokens)
        parts = list(embedded_parts(pipe.model, prompt, cache, 20))
        assert len(parts) > 5
        assert sum(map(length, parts)) == prompt.tokens
        found = joined(parts, prompt.layout)
        assert not parts and cache.get_seq_length() == 0, "nothing is decoded"
        assert found.keys() == whole.keys()
        close(found["inputs_embeds"], whole["inputs_embeds"])
        assert torch.equal(found["position_ids"], whole["position_ids"])
        if name == "llava":
            return
        assert torch.equal(found["visual_pos_masks"], whole["visual_pos_masks"])
        cut = sliced(whole, 30, prompt.tokens, prompt.layout)
        levels = whole["deepstack_visual_embeds"]
        before = int(whole["visual_pos_masks"][:, :30].sum())
        assert before
        for index, level in enumerate(levels):
            close(found["deepstack_visual_embeds"][index], level)
            assert torch.equal(cut["deepstack_visual_embeds"][index], level[before:])
            assert found["deepstack_visual_embeds"][index] is None, "read once"


@pytest.mark.daily("qwen", "moe", "llava")
@pytest.mark.parametrize("name", NAMES)
def test_prefill_in_parts_is_exact(
    pipes: dict[str, Pipeline], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = pipes[name]
    prompt = prompt_of(pipe)
    expected, hooks = at_once(pipe, prompt), hooks_of(pipe.model)
    monkeypatch.setattr(prefill_module, "MAX_TOKENS", 25)
    for chunk in (None, 7, 64):
        cache = pipe.new_cache()
        close(read_prompt(pipe.model, prompt, cache, chunk), expected)
        assert cache.get_seq_length() == prompt.tokens
        cache.close()
    assert hooks_of(pipe.model) == hooks


def test_a_video_with_its_sound_stays_whole(
    pipes: dict[str, Pipeline], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = pipes["omni"]
    sound = (np.sin(np.arange(48000) / 20).astype(np.float32), 16000)
    movie = write_movie(tmp_path / "movie.mp4", clip(24, 30), sound)
    media = pipe.read_media(PICTURES[:2], [movie, clip(8)], [sound], sound=True)
    prompt = prepare(pipe, "Who speaks?", media)
    expected = at_once(pipe, prompt)
    monkeypatch.setattr(prefill_module, "MAX_TOKENS", 10)
    shown = [len(part.media) for part in segments(by_frames(prompt, 10), 10)]
    assert len(shown) > 6 and max(shown) == 1
    close(read_prompt(pipe.model, prompt, pipe.new_cache()), expected)


def hooks_of(model: torch.nn.Module) -> int:
    return sum(len(one._forward_pre_hooks) + len(one._forward_hooks) for one in model.modules())


def test_packed_chunks_have_the_same_borders(pipes: dict[str, Pipeline]) -> None:
    """The decoder reads chunks of one size, however much the towers read at a time."""
    pipe = pipes["qwen"]
    prompt = prompt_of(pipe, "What is on the sign? " * 60)
    assert prompt.tokens > 300
    logits = []
    for media in (prompt.media, ()):
        cache = OscarCache("channel", model=pipe.model)
        cache.expect(prompt.modalities)
        one = Prompt(**{**vars(prompt), "media": media})
        assert (len(list(segments(one, 50))) > 5) == bool(media)
        with torch.inference_mode():
            logits.append(prefill(pipe.model, one, cache, 100))
    close(*logits)


def test_another_conversation_reads_on(pipes: dict[str, Pipeline]) -> None:
    """While a prompt is embedded, the model may decode for another thread's cache."""
    pipe = pipes["qwen"]
    prompt, other, found = prompt_of(pipe), OscarCache("bf16", model=pipe.model), []
    with torch.inference_mode():
        decoder = pipe.model.get_decoder()

        def meanwhile(_: Any, __: tuple, kwargs: dict[str, Any]) -> None:
            if cache_of(kwargs) is not other and not found:
                ids = torch.tensor([[5, 6, 7]])
                found.append(pipe.model(ids, **as_argument(other), use_cache=True).logits)

        hook = decoder.register_forward_pre_hook(meanwhile, with_kwargs=True)
        parts = list(embedded_parts(pipe.model, prompt, OscarCache("bf16", model=pipe.model), 1000))
        hook.remove()
    assert len(parts) == 1 and other.get_seq_length() == 3
    assert found[0].shape[1] == 3


@pytest.mark.gpu
def test_ids_and_media_wait_on_the_cpu(
    qwen3_vl_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = OscarVLPipeline(qwen3_vl_folder, device="cuda", dtype="float32", policy="bf16")
    prompt = prompt_of(pipe)
    where = {name: tensor.device.type for name, tensor in prompt.inputs.items()}
    assert set(where.values()) == {"cpu"}
    assert prompt.ids.device.type == prompt.positions.device.type == "cuda"
    whole = read_prompt(pipe.model, prompt, pipe.new_cache())
    monkeypatch.setattr(prefill_module, "MAX_TOKENS", 25)
    for chunk in (None, 30):
        found = read_prompt(pipe.model, prompt, pipe.new_cache(), chunk)
        torch.testing.assert_close(found, whole, atol=1e-3, rtol=1e-3)
