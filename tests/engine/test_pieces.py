"""Towers and MLPs that run in pieces give the same output as at once."""

from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from oscar_mm.engine import prefill as prefill_module
from oscar_mm.engine.prefill import in_pieces, read_prompt
from oscar_mm.pipelines.pipeline import Pipeline
from tests.engine.engine_waits import engine_waits
from tests.engine.pipelines import pipelines
from tests.prompts import clip, noise, prepare

PICTURES = [noise(96, 70), noise(250, 120, 2), noise(64, 64, 3)]
LONG = 1 << 20


@pytest.fixture(scope="module")
def pipes(folders: dict[str, Path]) -> dict[str, Pipeline]:
    return pipelines(folders, "channel")


def prompt_of(pipe: Pipeline) -> Any:
    videos = None if pipe.family.name == "LLaVA-NeXT" else [clip(6)]
    return prepare(pipe, "What?", pipe.read_media(PICTURES, videos))


@torch.inference_mode()
def logits(pipe: Pipeline) -> torch.Tensor:
    prompt = prompt_of(pipe)
    return pipe.model(**prompt.inputs, position_ids=prompt.positions).logits


def hooks_of(model: torch.nn.Module) -> int:
    return sum(len(one._forward_pre_hooks) + len(one._forward_hooks) for one in model.modules())


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.daily("qwen-1", "qwen-40", "omni-16", "omni-100")
@pytest.mark.parametrize("most", [1, 16, 40, 100])
@pytest.mark.parametrize("name", ["qwen", "omni"])
def test_towers_are_exact(
    pipes: dict[str, Pipeline], name: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, sizes = pipes[name], []
    whole = logits(pipe)
    monkeypatch.setattr(prefill_module, "MAX_PATCHES", most)
    tower = pipe.model.get_encoder(modality="image")
    seen = tower.patch_embed.register_forward_hook(lambda _, args, __: sizes.append(len(args[0])))
    with in_pieces(pipe.model, LONG, pipe.family.layout):
        close(logits(pipe), whole)
    seen.remove()
    inputs = prompt_of(pipe).inputs
    grid = torch.cat([inputs["image_grid_thw"], inputs["video_grid_thw"]])
    assert sum(sizes) == int(grid.prod(-1).sum())
    largest = int(grid[:, 1:].prod(-1).max())
    assert len(sizes) > 2 and max(sizes) <= max(most, largest)


@pytest.mark.daily("qwen", "moe-33", "llava-33")
@pytest.mark.parametrize("most", [1, 33])
@pytest.mark.parametrize("name", ["qwen", "moe", "omni", "llava"])
def test_mlps_are_exact(
    pipes: dict[str, Pipeline], name: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, sizes = pipes[name], []
    whole = logits(pipe)
    monkeypatch.setattr(prefill_module, "MAX_TOKENS", most)
    mlp = pipe.model.get_decoder().layers[1].mlp
    inner = mlp.experts if hasattr(mlp, "experts") else mlp.gate_proj
    seen = inner.register_forward_hook(lambda _, args, __: sizes.append(args[0].shape[-2]))
    with in_pieces(pipe.model, LONG, pipe.family.layout):
        close(logits(pipe), whole)
    seen.remove()
    assert sum(sizes) == whole.shape[1] and max(sizes) == most


def test_a_batch_is_cut_by_all_its_tokens(
    pipes: dict[str, Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = pipes["llava"].model
    mlp, states = model.get_decoder().layers[0].mlp, torch.randn(3, 10, 64)
    with torch.inference_mode(), monkeypatch.context() as patch:
        whole = mlp(states)
        patch.setattr(prefill_module, "MAX_TOKENS", 8)
        with in_pieces(model, LONG, pipes["llava"].family.layout):
            torch.testing.assert_close(mlp(states), whole)


def test_a_prompt_is_read_so(pipes: dict[str, Pipeline], monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = pipes["qwen"]
    before, prompt = hooks_of(pipe.model), prompt_of(pipe)
    with engine_waits(pipe):
        whole = read_prompt(pipe.model, prompt, pipe.new_cache())
    entered: list[int] = []
    monkeypatch.setattr(prefill_module, "MAX_TOKENS", 20)
    monkeypatch.setattr(prefill_module, "MAX_PATCHES", 20)
    mlp = pipe.model.get_decoder().layers[0].mlp.gate_proj
    seen = mlp.register_forward_hook(lambda _, args, __: entered.append(args[0].shape[1]))
    for chunk in (None, 64):
        found = read_prompt(pipe.model, prompt, pipe.new_cache(), chunk)
        if chunk is None:
            close(found, whole)
        assert max(entered) == 20 and sum(entered) == prompt.tokens
        entered.clear()
    seen.remove()
    assert hooks_of(pipe.model) == before, "nothing is left on the model"


def test_few_tokens_are_left_alone(pipes: dict[str, Pipeline]) -> None:
    model, layout = pipes["qwen"].model, pipes["qwen"].family.layout
    before = hooks_of(model)
    with in_pieces(model, prefill_module.MAX_TOKENS, layout):
        assert hooks_of(model) == before
    with in_pieces(model, prefill_module.MAX_TOKENS + 1, layout):
        assert hooks_of(model) > before
    assert hooks_of(model) == before


def test_other_threads_are_left_alone(
    pipes: dict[str, Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, sizes, found = pipes["qwen"], [], []
    whole = logits(pipe)
    monkeypatch.setattr(prefill_module, "MAX_TOKENS", 10)
    mlp = pipe.model.get_decoder().layers[0].mlp.gate_proj
    seen = mlp.register_forward_hook(lambda _, args, __: sizes.append(args[0].shape[1]))
    with in_pieces(pipe.model, LONG, pipe.family.layout):
        other = Thread(target=lambda: found.append(logits(pipe)))
        other.start()
        other.join()
    seen.remove()
    assert sizes == [whole.shape[1]]
    close(found[0], whole)


def test_an_error_leaves_nothing_behind(
    pipes: dict[str, Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = pipes["qwen"]
    whole, before = logits(pipe), hooks_of(pipe.model)

    def broken(*_: object) -> None:
        raise MemoryError("none left")

    tower = pipe.model.get_encoder(modality="image")
    with monkeypatch.context() as patch, in_pieces(pipe.model, LONG, pipe.family.layout):
        patch.setattr(prefill_module, "MAX_PATCHES", 16)
        hook = tower.blocks[0].register_forward_hook(broken)
        with pytest.raises(MemoryError):
            logits(pipe)
        hook.remove()
        close(logits(pipe), whole)
    assert hooks_of(pipe.model) == before


def test_grids_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_module, "MAX_PATCHES", 50)
    grid = torch.tensor([[1, 4, 4], [5, 4, 4], [1, 10, 10], [1, 2, 2]])
    found = [part.tolist() for part in prefill_module._grids(grid)]
    assert found == [[[1, 4, 4], [2, 4, 4]], [[3, 4, 4]], [[1, 10, 10]], [[1, 2, 2]]]
    assert [part.tolist() for part in prefill_module._grids(grid[:1])] == [[[1, 4, 4]]]
