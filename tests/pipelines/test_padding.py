"""Rows padded on the left, and what they show side by side."""

import torch

from oscar_mm.pipelines.batch import left_padded
from tests.prompts import clip, noise, tone


def prompts(pipe, *shown):
    return [
        pipe.prepare("What is it? " * (3 - i), pipe.read_media(**x), None)
        for i, x in enumerate(shown)
    ]


def test_a_single_row_stays_as_it_is(qwen) -> None:
    [alone] = prompts(qwen, {"images": noise(64, 64)})
    joined = left_padded([alone], qwen.family)
    assert "attention_mask" not in joined.inputs
    assert joined.inputs.keys() == alone.inputs.keys()
    for name, tensor in alone.inputs.items():
        assert torch.equal(joined.inputs[name], tensor)
    assert torch.equal(joined.positions, alone.positions)


def test_rows(qwen) -> None:
    rows = prompts(
        qwen, {"images": noise(64, 64)}, {}, {"videos": clip(4), "images": noise(64, 96)}
    )
    joined = left_padded(rows, qwen.family)
    assert joined.positions.shape == (4, 3, joined.tokens)
    assert joined.next_position.tolist() == [int(row.next_position) for row in rows]
    mask = joined.inputs["attention_mask"]
    for index, row in enumerate(rows):
        before = joined.tokens - row.tokens
        assert mask[index].tolist() == [0] * before + [1] * row.tokens
        assert torch.equal(joined.inputs["input_ids"][index, before:], row.inputs["input_ids"][0])
        assert torch.equal(joined.positions[:, index, before:], row.positions[:, 0])
        assert joined.modalities[index].tolist() == [-1] * before + row.modalities[0].tolist()
    padding = joined.inputs["input_ids"][mask == 0]
    config = qwen.model.config
    assert not set(padding.tolist()) & {config.image_token_id, config.video_token_id}
    # Pictures of the rows one after the other.
    grids = [row.inputs["image_grid_thw"] for row in (rows[0], rows[2])]
    assert torch.equal(joined.inputs["image_grid_thw"], torch.cat(grids))


def test_pictures_of_unequal_tiles(llava) -> None:
    rows = prompts(llava, {"images": noise(56, 56)}, {"images": [noise(40, 200), noise(110, 112)]})
    tiles = [row.inputs["pixel_values"].shape[1] for row in rows]
    assert tiles[0] != tiles[1]
    joined = left_padded(rows, llava.family).inputs
    assert joined["pixel_values"].shape[:2] == (3, max(tiles))
    assert joined["image_sizes"].tolist() == [[56, 56], [40, 200], [110, 112]]


def test_sounds_of_unequal_length(omni) -> None:
    rows = prompts(omni, {"audio": [tone(0.5), tone(1.5)]}, {}, {"audio": tone(3.0)})
    joined = left_padded(rows, omni.family).inputs
    frames = joined["feature_attention_mask"].sum(-1)
    assert joined["input_features"].shape[0] == 3 and frames[2] > frames[1] > frames[0]
    assert joined["input_features"].shape[2] == joined["feature_attention_mask"].shape[1]
    assert torch.equal(
        joined["input_features"][2, :, : frames[2]],
        rows[2].inputs["input_features"][0][:, : frames[2]],
    )
