"""Attention reads the tokens of all streams, whichever pages and slots they are in."""

import pytest
import torch

from oscar_mm.cache.layer import TokenPlaces
from tests.cache.invariants import POLICIES, filled, random_ids


@pytest.mark.parametrize(
    "policy", ["channel", "mixed", "bf16", "no_window", "stream", "stream_mixed"]
)
@pytest.mark.parametrize("forgotten", [(), ((0, 3), (50, 300), (600, 640))])
def test_parts_of_all_streams_are_those_of_each(
    policy: str, forgotten: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Parts of a page or two, and 16-bit tokens in more than one part; the last ones are joined.
    monkeypatch.setattr("oscar_mm.cache.layer._CPU_PAGES", 2)
    monkeypatch.setattr("oscar_mm.cache.layer._FEW_TOKENS", 50)
    cache, _ = filled(POLICIES[policy], random_ids(3, 60, 400, 50, 300))
    for start, stop in forgotten:
        cache.forget(start, stop)
    layer, [sequence] = cache.layers[0], cache.kv_manager.sequences
    held = TokenPlaces.of(sequence.streams.values(), layer.device)
    are_full = [run.used is None for runs in held.pages.values() for run in runs]
    if held.pages and layer.cache.policy.key_axis == "channel":
        assert all(are_full) == (not forgotten)
    elif held.pages:
        # The last page of a stream is seldom full.
        assert not all(are_full)

    packed = {bits: [] for bits in held.pages}
    in_16_bit = []
    for code, stream in sequence.streams.items():
        in_pages, in_slots = torch.from_numpy(sequence.positions(code)).split(
            [stream.packed, len(stream.slots)]
        )
        if stream.packed:
            packed[stream.bits].append(in_pages)
        in_16_bit.append(in_slots)
    assert len(in_16_bit) > 1
    order = torch.cat([*(one for found in packed.values() for one in found), *in_16_bit])
    parts = zip(*layer.parts(held, layer.dtype), strict=True)
    for side, stored in zip(parts, cache.unpacked(0), strict=True):
        assert torch.equal(torch.cat(side, dim=1), stored[0][:, order])


def test_nothing_is_stored_of_no_tokens() -> None:
    held = TokenPlaces.of([], torch.device("cpu"))
    assert not held.pages and held.slots.shape == (0,) and held.slots.dtype == torch.int64
