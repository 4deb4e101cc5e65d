"""Prompts in parts."""

from itertools import pairwise

import pytest
import torch

from oscar_mm import OscarVLPipeline
from oscar_mm.engine.prompt import Prompt, beginning, by_frames, remaining, segments
from tests.prompts import clip, noise, prepare


@pytest.fixture(scope="module")
def prompt(qwen3_vl_folder) -> Prompt:
    pipe = OscarVLPipeline(qwen3_vl_folder, device="cpu")
    pictures = [noise(96, 70), noise(250, 120, 2), noise(64, 64, 3)]
    return prepare(pipe, "What? " * 20, pipe.read_media(pictures, [clip(6)]))


@pytest.mark.parametrize("most", [1, 8, 40, 10**6])
def test_segments_are_the_prompt(prompt: Prompt, most: int) -> None:
    parts = list(segments(prompt, most))
    media = [span for part in parts for span in part.media]
    assert [span.digest for span in media] == [span.digest for span in prompt.media]
    for name, tensor in prompt.inputs.items():
        found = [part.inputs[name] for part in parts if name in part.inputs]
        assert torch.equal(torch.cat(found, dim=1 if name == "input_ids" else 0), tensor), name
    assert torch.equal(torch.cat([part.positions for part in parts], dim=-1), prompt.positions)
    assert torch.equal(torch.cat([part.modalities for part in parts], dim=1), prompt.modalities)
    for part, after in pairwise(parts):
        assert part.tokens <= most or len(part.media) == 1
        assert torch.equal(part.next_position, after.positions[-1, :, 0])
        for span in part.media:
            assert bool((part.modalities[0, span.start : span.stop] == span.modality).any())
    assert torch.equal(parts[-1].next_position, prompt.next_position)


def test_beginning_and_remaining(prompt: Prompt) -> None:
    stop = prompt.media[1].stop
    first, rest = beginning(prompt, stop), remaining(prompt, stop)
    assert first.tokens + rest.tokens == prompt.tokens
    assert first.media == prompt.media[:2]
    assert [span.digest for span in rest.media] == [span.digest for span in prompt.media[2:]]
    assert "pixel_values_videos" not in first.inputs and "pixel_values_videos" in rest.inputs
    for tokens in (0, prompt.tokens + 1):
        with pytest.raises(ValueError, match="are out of range"):
            beginning(prompt, tokens)
    with pytest.raises(ValueError, match="within a media item"):
        beginning(prompt, stop - 1)


def test_several_rows_stay_whole(prompt: Prompt) -> None:
    both = Prompt(
        {"input_ids": prompt.inputs["input_ids"].expand(2, -1)},
        *(prompt.positions.expand(-1, 2, -1), prompt.next_position.expand(2)),
        prompt.modalities.expand(2, -1),
    )
    assert list(segments(both, 8)) == [both]


@pytest.mark.parametrize("most", [1, 12, 30, 10**6])
def test_a_video_frame_by_frame(prompt: Prompt, most: int) -> None:
    cut = by_frames(prompt, most)
    [grid], video = prompt.inputs["video_grid_thw"].tolist(), prompt.media[-1]
    grids = cut.inputs["video_grid_thw"].tolist()
    assert cut.media[:3] == prompt.media[:3] and len(cut.media) == 3 + len(grids)
    assert sum(frames for frames, *_ in grids) == grid[0] == 3
    assert len(grids) == {1: 3, 12: 3, 30: 2}.get(most, 1)
    assert all(size == grid[1:] for _, *size in grids)
    assert cut.media[3].start == video.start and cut.media[-1].stop == video.stop
    for (frames, down, across), span in zip(grids, cut.media[3:], strict=True):
        kinds = prompt.modalities[0, span.start : span.stop]
        assert int((kinds == 2).sum()) == frames * down * across // 4
        assert kinds[0] == kinds[-1] == 2
