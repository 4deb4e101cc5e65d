"""The bytes of a page."""

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_mm import InputError, KVPolicy
from oscar_mm.cache.layout import ALIGNMENT, PAGE_TOKENS, PageFormat, divided_group

PRESETS = ("compact", "oscar", "kivi", "quarot")
FORMATS = [
    PageFormat.of(KVPolicy.preset(name), bits, kv_heads, head_dim)
    for name, bits, kv_heads, head_dim in product(
        PRESETS, (2, 4), (1, 2, 8), (4, 64, 72, 80, 96, 112, 128, 256)
    )
] + [
    PageFormat.of(KVPolicy(key_axis=axis, key_group=keys, value_group=values), 2, 2, 96)
    for axis, keys, values in product(("channel", "token"), (32, 64, 128), (32, 64, 128))
]


def name_of(page: PageFormat) -> str:
    return f"{page.key_axis}{page.key_group}-{page.bits}-{page.kv_heads}x{page.head_dim}"


def extents(page: PageFormat) -> list[tuple[int, int]]:
    """First and last byte + 1 of every array of a page, heads unrolled."""
    found = []
    for field in page.fields.values():
        for head in range(page.kv_heads if field.per_head else 1):
            start = field.offset + head * page.head_bytes
            found.append((start, start + field.nbytes))
    return found


@pytest.mark.parametrize("page", FORMATS, ids=name_of)
def test_fields(page: PageFormat) -> None:
    spans = sorted(extents(page))
    assert spans[0][0] == 0 and spans[-1][1] <= page.page_bytes
    for (_, stop), (start, _) in pairwise(spans):
        assert stop <= start < stop + ALIGNMENT
    assert all(start % ALIGNMENT == 0 for start, _ in spans)
    assert page.page_bytes % ALIGNMENT == 0
    assert sum(page.bytes_by_kind.values()) == page.page_bytes
    elements = 2 * PAGE_TOKENS * page.kv_heads * page.head_dim
    assert page.bytes_by_kind["codes"] * 8 == elements * page.bits
    assert page.bits_per_value == page.page_bytes * 8 / elements


def content(page: PageFormat, count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random arrays of pages, in the shapes that ``write`` takes."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, field in page.fields.items():
        shape = field.shape
        if field.kind == "codes":
            shape = (PAGE_TOKENS, page.head_dim)
        elif name.startswith("value"):
            shape = shape[::-1]
        lead = (count, page.kv_heads) if field.per_head else (count,)
        made[name] = torch.randint(0, 1 << page.bits, (*lead, *shape), generator=generator)
    return made


@pytest.mark.parametrize("page", FORMATS[::5] + FORMATS[1::7], ids=name_of)
def test_arrays_do_not_overlap(page: PageFormat) -> None:
    pages = torch.full((3, page.page_bytes), 0xA5, dtype=torch.uint8)
    written = content(page, 3)
    for name, array in written.items():
        page.write(pages, name, array)
    for name, array in written.items():
        found = page.read(pages, name)
        assert torch.equal(found.long(), array)
        assert found.dtype == (torch.uint8 if "codes" in name else torch.float32)
    untouched = torch.ones(page.page_bytes, dtype=torch.bool)
    for start, stop in extents(page):
        untouched[start:stop] = False
    assert (pages[:, untouched] == 0xA5).all()


def test_heads_are_contiguous() -> None:
    page = PageFormat.of(KVPolicy(), 2, 4, 128)
    pages = torch.zeros(2, page.page_bytes, dtype=torch.uint8)
    for name, array in content(page, 2).items():
        array[:] = 0
        array[1, 2] = 1
        page.write(pages, name, array)
    touched = pages.nonzero()
    assert set(touched[:, 0].tolist()) == {1}
    start, stop = 2 * page.head_bytes, 3 * page.head_bytes
    assert ((touched[:, 1] >= start) & (touched[:, 1] < stop)).all()


@pytest.mark.parametrize(("bits", "head_dim"), [(2, 64), (2, 128), (4, 64), (4, 128)])
def test_place_of_a_code_for_the_kernels(bits: int, head_dim: int) -> None:
    """Bit places as the text of fragments.py states them, element by element."""
    page = PageFormat.of(KVPolicy(), bits, 1, head_dim)
    parity = 2 if bits == 2 else 1
    near = min(4, head_dim // 16 // parity)
    for token, channel in product((0, 1, 9, 38, 127), (0, 3, 8, 21, 37, head_dim - 1)):
        tile, half, group = token // 16, token // 8 % 2, token % 8
        step, chalf, quad, odd = channel // 16, channel // 8 % 2, channel // 2 % 4, channel % 2
        key = (half, odd, chalf, step, 4 * group + quad, tile)
        tile, thalf, quad, odd = token // 16, token // 8 % 2, token // 2 % 4, token % 2
        step = channel // 32 * 2 + channel // 4 % 2
        group = 2 * (channel // 8 % 4) + channel % 2
        value = (thalf, odd, channel // 2 % 2, step, 4 * group + quad, tile)
        for name, (high, odd, low, step, lane, tile) in (("key", key), ("value", value)):
            pages = torch.zeros(1, page.page_bytes, dtype=torch.uint8)
            codes = torch.zeros(1, 1, PAGE_TOKENS, head_dim)
            codes[0, 0, token, channel] = 1
            page.write(pages, f"{name}_codes", codes)
            far, word = divmod(step // parity, near)
            word += near * (lane + 32 * (far + head_dim // 16 // parity // near * tile))
            code = low + 2 * (step % parity) + 2 * parity * high + 4 * parity * odd
            bit = 8 * page.fields[f"{name}_codes"].offset + 32 * word + bits * code
            assert pages.nonzero().tolist() == [[0, bit // 8]]
            assert int(pages[0, bit // 8]) == 1 << bit % 8


def test_sizes_that_the_design_names() -> None:
    for key_group, head_bytes, bits in ((128, 9472, 2.3125), (64, 9984, 2.4375)):
        compact = PageFormat.of(KVPolicy(key_group=key_group), 2, 8, 128)
        assert compact.head_bytes == head_bytes and compact.page_bytes == 8 * head_bytes
        assert compact.bits_per_value == bits
    assert PageFormat.of(KVPolicy(), 2, 8, 128).bits_per_value < 2.45
    assert PageFormat.of(KVPolicy.preset("oscar"), 2, 8, 128).bits_per_value <= 3.03


@given(st.integers(1, 300), st.sampled_from([32, 64, 128]))
@settings(max_examples=200)
def test_divided_group(channels: int, group: int) -> None:
    found = divided_group(group, channels)
    assert channels % found == 0 and found <= group
    assert not any(channels % larger == 0 for larger in range(found + 1, min(group, channels) + 1))


@pytest.mark.parametrize(("bits", "head_dim"), [(2, 66), (2, 1), (4, 65)])
def test_codes_that_do_not_fill_bytes(bits: int, head_dim: int) -> None:
    with pytest.raises(InputError, match=rf"head_dim={head_dim}.*bf16"):
        PageFormat.of(KVPolicy(), bits, 2, head_dim)
