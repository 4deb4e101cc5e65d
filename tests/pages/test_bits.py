"""Codes in bytes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oscar_mm.pages.layout import pack_bits, unpack_bits


@given(st.data(), st.sampled_from([2, 4]), st.integers(0, 9), st.integers(1, 3))
def test_round_trip(data: st.DataObject, bits: int, count: int, rows: int) -> None:
    per_byte = 8 // bits
    code = st.integers(0, (1 << bits) - 1)
    numbers = data.draw(
        st.lists(code, min_size=rows * count * per_byte, max_size=rows * count * per_byte)
    )
    codes = torch.tensor(numbers, dtype=torch.uint8).view(rows, count * per_byte)
    packed = pack_bits(codes, bits)
    assert packed.shape == (rows, count) and packed.dtype == torch.uint8
    assert torch.equal(unpack_bits(packed, bits), codes)
    assert torch.equal(pack_bits(codes.float(), bits), packed)


@given(st.lists(st.integers(0, 255), min_size=1, max_size=20), st.sampled_from([2, 4]))
def test_every_byte_is_codes(values: list[int], bits: int) -> None:
    packed = torch.tensor(values, dtype=torch.uint8)
    assert torch.equal(pack_bits(unpack_bits(packed, bits), bits), packed)


def test_lowest_bits_first() -> None:
    assert pack_bits(torch.tensor([1, 2, 3, 0]), 2).tolist() == [1 | 2 << 2 | 3 << 4]
    assert pack_bits(torch.tensor([5, 10]), 4).tolist() == [5 | 10 << 4]


def test_input_is_not_written_to() -> None:
    codes = torch.tensor([3, 3, 3, 3], dtype=torch.uint8)
    pack_bits(codes, 2)
    assert codes.tolist() == [3] * 4


@pytest.mark.parametrize(("count", "bits"), [(3, 2), (1, 4), (126, 2)])
def test_codes_that_do_not_fill_bytes(count: int, bits: int) -> None:
    with pytest.raises(ValueError, match=f"{count} codes of {bits} bits"):
        pack_bits(torch.zeros(2, count), bits)
