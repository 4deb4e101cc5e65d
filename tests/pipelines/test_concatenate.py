"""Prompts in line: one row of several prompts, and what they show one after the other."""

import torch

from tests.prompts import clip, noise, prepare, tone


def prompts(pipe, *shown):
    return [
        prepare(pipe, "What is it? " * (3 - i), pipe.read_media(**x)) for i, x in enumerate(shown)
    ]


def test_a_single_prompt_stays_as_it_is(qwen) -> None:
    [alone] = prompts(qwen, {"images": noise(64, 64)})
    joined = qwen.family.concatenate([alone])
    assert joined.inputs.keys() == alone.inputs.keys()
    for name, tensor in alone.inputs.items():
        assert torch.equal(joined.inputs[name], tensor)
    assert torch.equal(joined.positions, alone.positions) and joined.media == alone.media


def test_prompts(qwen) -> None:
    rows = prompts(
        qwen, {"images": noise(64, 64)}, {}, {"videos": clip(4), "images": noise(64, 96)}
    )
    joined = qwen.family.concatenate(rows)
    assert joined.positions.shape == (4, 1, joined.tokens)
    assert "attention_mask" not in joined.inputs
    stop = 0
    for row in rows:
        own = slice(stop, stop := stop + row.tokens)
        assert torch.equal(joined.inputs["input_ids"][:, own], row.inputs["input_ids"])
        assert torch.equal(joined.positions[:, :, own], row.positions)
        assert torch.equal(joined.modalities[:, own], row.modalities)
        shown = [x for x in joined.media if own.start <= x.start < own.stop]
        assert [x.shifted(-own.start) for x in shown] == list(row.media)
    assert stop == joined.tokens
    # Pictures of the rows one after the other.
    grids = [row.inputs["image_grid_thw"] for row in (rows[0], rows[2])]
    assert torch.equal(joined.inputs["image_grid_thw"], torch.cat(grids))


def test_pictures_of_unequal_tiles(llava) -> None:
    rows = prompts(llava, {"images": noise(56, 56)}, {"images": [noise(40, 200), noise(110, 112)]})
    tiles = [row.inputs["pixel_values"].shape[1] for row in rows]
    assert tiles[0] != tiles[1]
    joined = llava.family.concatenate(rows).inputs
    assert joined["pixel_values"].shape[:2] == (3, max(tiles))
    assert joined["image_sizes"].tolist() == [[56, 56], [40, 200], [110, 112]]


def test_sounds_of_unequal_length(omni) -> None:
    rows = prompts(omni, {"audio": [tone(0.5), tone(1.5)]}, {}, {"audio": tone(3.0)})
    joined = omni.family.concatenate(rows).inputs
    frames = joined["feature_attention_mask"].sum(-1)
    assert joined["input_features"].shape[0] == 3 and frames[2] > frames[1] > frames[0]
    assert joined["input_features"].shape[2] == joined["feature_attention_mask"].shape[1]
    assert torch.equal(
        joined["input_features"][2, :, : frames[2]],
        rows[2].inputs["input_features"][0][:, : frames[2]],
    )
