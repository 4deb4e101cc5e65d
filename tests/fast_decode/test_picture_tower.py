"""Vision towers as graphs, against the same towers as modules, picture by picture."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from benchmarks.random_model import FAMILIES, RANDOM_MODELS
from oscar_mm.fast_decode import picture_tower
from oscar_mm.fast_decode.graph_runner import SmallGraphs
from oscar_mm.fast_decode.picture_tower import Picture, PictureTower, Sides, within
from oscar_mm.kernels.self_check import relative_error
from oscar_mm.ops.varlen import boundaries
from tests.engine.mixing import Capture

GRIDS = [(4, 6), (16, 16), (2, 8), (32, 24)]


def tower_of(name: str, **vision: int) -> Any:
    released = RANDOM_MODELS[name].tiny()
    released.vision.update(vision)
    model_class, config, _ = FAMILIES[released.family](released)
    torch.manual_seed(0)
    model = model_class._from_config(config).eval()
    return getattr(model, "thinker", model).get_encoder(modality="image")


def noise(tower: Any, grids: list[tuple[int, int]]) -> list[Picture]:
    values = tower.patch_embed.proj.weight[0].numel()
    generator = torch.Generator().manual_seed(1)
    return [
        Picture(torch.randn(a * b, values, generator=generator).to(tower.device), a, b)
        for a, b in grids
    ]


def by_modules(tower: Any, picture: Picture) -> torch.Tensor:
    grid = torch.tensor([[1, picture.rows, picture.columns]], device=tower.device)
    pixels = picture.pixels.to(tower.dtype)
    found = tower(pixels, grid_thw=grid, return_dict=True)
    return torch.stack([found.pooler_output, *found.deepstack_features])


@pytest.mark.parametrize("name", ["qwen3-vl-8b", "qwen3-vl-30b-a3b", "qwen3-omni-30b-a3b"])
@torch.inference_mode()
def test_pictures_together_are_those_alone(name: str) -> None:
    tower, capture = tower_of(name), Capture()
    before = tower.config._attn_implementation
    pictures, graphs = noise(tower, GRIDS), PictureTower(tower, capture)
    expected = [by_modules(tower, picture) for picture in pictures]
    for order in (1, -1, 1):  # Eagerly, captured and replayed, also where others were before.
        graphs._inputs[0].fill_(torch.nan)  # Padding must not be read.
        found = list(graphs(pictures[::order]))
        torch.testing.assert_close(found, expected[::order])
    assert capture.made == 1
    assert tower.config._attn_implementation == before


@torch.inference_mode()
def test_many_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """In several runs, each of which overwrites the result of the one before."""
    monkeypatch.setattr(picture_tower, "MAX_PATCHES", 256)
    tower = tower_of("qwen3-vl-8b")
    pictures = noise(tower, 10 * [(2, 2)] + [(16, 16), (4, 12), (2, 2)])
    expected = [by_modules(tower, picture) for picture in pictures]
    torch.testing.assert_close(list(PictureTower(tower, Capture())(pictures)), expected)


@torch.inference_mode()
def test_attention_stays_within_the_rows() -> None:
    """Also if the ends are those of a run with more rows."""
    tower = tower_of("qwen3-vl-8b")
    graphs, [small, large] = PictureTower(tower, Capture()), noise(tower, [(4, 6), (32, 24)])
    [expected] = graphs([small])
    list(graphs([large]))
    assert int(graphs._ends.max()) > 256
    assert graphs._computed(256).shape[1] == 64
    [found] = graphs([small])
    assert torch.equal(found, expected)


def test_a_tower_with_a_hook_runs_as_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture_tower, "can_attend", lambda queries: True)
    tower = tower_of("qwen3-vl-8b")
    assert PictureTower.takes(tower)
    with tower.blocks[1].register_forward_hook(lambda *_: None):
        assert not PictureTower.takes(tower)
    assert PictureTower.takes(tower)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 72, 80])
def test_attention_on_a_gpu(head_dim: int) -> None:
    counts = [1024, 0, 7, 300]
    sides = torch.randn(3, sum(counts), 3, head_dim, device="cuda", dtype=torch.bfloat16)
    ends = boundaries(counts, sides.device)
    expected = within(Sides(*sides.double().cpu()), ends.cpu(), 1024, 0.1)
    found = within(Sides(*sides), ends, 2048, 0.1)
    assert relative_error(found.cpu(), expected) < 0.02


@pytest.mark.gpu
@torch.inference_mode()
def test_graphs_on_a_gpu() -> None:
    """In bfloat16, as near to float32 as the modules are."""
    tower = tower_of("qwen3-vl-8b", hidden_size=144, num_heads=2).cuda().bfloat16()
    pictures, twin = noise(tower, GRIDS), deepcopy(tower).float()
    exact = [by_modules(twin, picture) for picture in pictures]
    assert PictureTower.takes(tower)
    usual = [by_modules(tower, picture) for picture in pictures]
    graphs = PictureTower(tower, SmallGraphs())
    for order in (1, -1, 1):
        found = list(graphs(pictures[::order]))[::order]
        for mine, theirs, truth in zip(found, usual, exact, strict=True):
            assert (mine - truth).norm() <= 1.5 * (theirs - truth).norm()
    assert not graphs.fails
