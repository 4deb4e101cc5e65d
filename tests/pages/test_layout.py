"""The bytes of a page."""

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_mm import InputError, KVPolicy
from oscar_mm.ops.unpack import unpack
from oscar_mm.pages.codecs.base import divided_group
from oscar_mm.pages.layout import ALIGNMENT, PAGE_TOKENS, PageFormat
from oscar_mm.policy import Bits
from oscar_mm.quant.basis import Basis
from tests.pairs import pairs

PRESETS = ("channel", "oscar", "kivi", "quarot")
TWO, FOUR = Bits(2, 2), Bits(4, 4)
BIT_PAIRS = [Bits(keys, values) for keys, values in product((2, 3, 4), repeat=2)]
BY_TOKEN = {"key_axis": "token", "token_scaling": None}
STREAM = KVPolicy(**BY_TOKEN, center=True)
FORMATS = [
    PageFormat.of(KVPolicy.preset(name), bits, kv_heads, head_dim)
    for name, bits, kv_heads, head_dim in pairs(
        PRESETS, (TWO, FOUR), (1, 2, 8), (4, 64, 72, 80, 96, 112, 128, 256)
    )
] + [
    PageFormat.of(
        KVPolicy.preset("channel", key_group=keys, value_group=values, **axis), TWO, 2, 96
    )
    for axis, keys, values in pairs(({}, BY_TOKEN), (32, 64, 128), (32, 64, 128))
]
MIXED_FORMATS = [
    PageFormat.of(policy, bits, 2, head_dim)
    for policy, bits, head_dim in pairs(
        (
            KVPolicy.preset("channel"),
            STREAM,
            KVPolicy(**BY_TOKEN, key_group=32, value_group=32),
            KVPolicy(**BY_TOKEN, value_group=32, center=True),
        ),
        BIT_PAIRS,
        (64, 72, 80, 128),
    )
]
STREAM_FORMATS = [page for page in FORMATS + MIXED_FORMATS if page.codec.appends_tokens]


def name_of(page: PageFormat) -> str:
    center = "-center" * page.center
    groups = f"{page.key_group}-{page.value_group}"
    return f"{page.key_axis}{groups}-{page.bits}-{page.kv_heads}x{page.head_dim}{center}"


def extents(page: PageFormat) -> list[tuple[int, int]]:
    """First and last byte + 1 of every array of a page, heads unrolled."""
    found = []
    for field in page.fields.values():
        for head in range(page.kv_heads if field.per_head else 1):
            start = field.offset + head * page.head_bytes
            found.append((start, start + field.nbytes))
    return found


@pytest.mark.parametrize("page", FORMATS + MIXED_FORMATS, ids=name_of)
def test_fields(page: PageFormat) -> None:
    spans = sorted(extents(page))
    assert spans[0][0] == 0 and spans[-1][1] <= page.page_bytes
    for (_, stop), (start, _) in pairwise(spans):
        assert stop <= start < stop + ALIGNMENT
    assert all(start % ALIGNMENT == 0 for start, _ in spans)
    assert page.page_bytes % ALIGNMENT == 0
    assert sum(page.bytes_by_kind.values()) == page.page_bytes
    elements = 2 * PAGE_TOKENS * page.kv_heads * page.head_dim
    assert page.bytes_by_kind["codes"] * 8 * 2 == elements * sum(page.bits)
    assert page.bits_per_value == page.page_bytes * 8 / elements


def content(page: PageFormat, count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random arrays of pages, in the shapes that ``write`` takes."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, field in page.fields.items():
        if name.endswith("_high"):
            continue  # of the codes that are there already
        shape = field.shape
        bits = page.bits.keys if name.startswith("key") else page.bits.values
        if field.kind == "codes":
            shape = (PAGE_TOKENS, page.head_dim)
        lead = (count, page.kv_heads) if field.per_head else (count,)
        made[name] = torch.randint(0, 1 << bits, (*lead, *shape), generator=generator)
    return made


@pytest.mark.parametrize("page", FORMATS + MIXED_FORMATS, ids=name_of)
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
    page = PageFormat.of(KVPolicy.preset("channel"), TWO, 4, 128)
    pages = torch.zeros(2, page.page_bytes, dtype=torch.uint8)
    for name, array in content(page, 2).items():
        array[:] = 0
        array[1, 2] = 1
        page.write(pages, name, array)
    touched = pages.nonzero()
    assert set(touched[:, 0].tolist()) == {1}
    start, stop = 2 * page.head_bytes, 3 * page.head_bytes
    assert ((touched[:, 1] >= start) & (touched[:, 1] < stop)).all()


def in_fragments(token: int, channel: int) -> dict[str, tuple[int, ...]]:
    """Return the place of a key's and a value's code, as fragments.py documents it: token half,
    odd, channel half, step, lane and tile."""
    tile, half, group = token // 16, token // 8 % 2, token % 8
    step, chalf, quad, odd = channel // 16, channel // 8 % 2, channel // 2 % 4, channel % 2
    key = (half, odd, chalf, step, 4 * group + quad, tile)
    tile, thalf, quad, odd = token // 16, token // 8 % 2, token // 2 % 4, token % 2
    step = channel // 32 * 2 + channel // 4 % 2
    group = 2 * (channel // 8 % 4) + channel % 2
    value = (thalf, odd, channel // 2 % 2, step, 4 * group + quad, tile)
    return {"key": key, "value": value}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("policy", "bits"),
    [(KVPolicy.preset("channel"), 2), (KVPolicy.preset("channel"), 4), (STREAM, 2), (STREAM, 4)],
)
def test_place_of_a_code_for_the_kernels(policy: KVPolicy, bits: int, head_dim: int) -> None:
    """Bit places as the text of fragments.py states them, element by element."""
    page = PageFormat.of(policy, Bits(bits, bits), 1, head_dim)
    assert page.in_fragments
    parity = 2 if bits == 2 else 1
    near = min(4, head_dim // 16 // parity)
    for token, channel in product((0, 1, 9, 38, 127), (0, 3, 8, 21, 37, head_dim - 1)):
        for name, (high, odd, low, step, lane, tile) in in_fragments(token, channel).items():
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


@pytest.mark.parametrize("page", [one for one in MIXED_FORMATS if 3 in one.bits], ids=name_of)
def test_codes_of_three_bits_are_in_two_arrays(page: PageFormat) -> None:
    """The low two bits come first, laid out like 2-bit codes, then the high bits."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 8, (2, page.kv_heads, PAGE_TOKENS, page.head_dim), generator=generator)
    ones = torch.tensor([byte.bit_count() for byte in range(256)])
    for side, bits in zip(("key", "value"), page.bits, strict=True):
        name = f"{side}_codes"
        assert (f"{name}_high" in page.fields) == (bits == 3)
        if bits != 3:
            continue
        low, high = page.fields[name], page.fields[f"{name}_high"]
        assert low.nbytes == 2 * high.nbytes == PAGE_TOKENS * page.head_dim // 4
        assert high.offset == low.offset + low.nbytes
        pages = torch.zeros(2, page.page_bytes, dtype=torch.uint8)
        page.write(pages, name, codes)
        assert torch.equal(page.read(pages, name).long(), codes)
        page.write(pages, name, codes & 3)
        heads = pages.unflatten(1, (page.kv_heads, -1))
        assert not heads[..., high.offset : high.offset + high.nbytes].any()
        narrow = replace(page, bits=page.bits._replace(**{f"{side}s": 2}))
        if narrow.in_fragments == page.in_fragments:
            other = torch.zeros(2, narrow.page_bytes, dtype=torch.uint8)
            narrow.write(other, name, codes & 3)
            first = narrow.fields[name].offset
            found = heads[..., low.offset : low.offset + low.nbytes]
            expected = other.unflatten(1, (page.kv_heads, -1))[..., first : first + low.nbytes]
            assert torch.equal(found, expected)
        page.write(pages, name, codes & 4)
        assert not heads[..., low.offset : low.offset + low.nbytes].any()
        found = ones[heads[..., high.offset : high.offset + high.nbytes].long()].sum(-1)
        assert torch.equal(found, (codes >> 2).sum((2, 3)))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_place_of_a_high_bit_for_the_kernels(head_dim: int) -> None:
    """As the text of fragments.py states it: a word is for four steps, and the high bit of a code
    is at the place of its low two, or beside it where step / 2 is odd."""
    page = PageFormat.of(STREAM, Bits(3, 3), 1, head_dim)
    near = head_dim // 64
    for token, channel in product((0, 1, 9, 38, 127), (0, 3, 8, 21, 37, 58, head_dim - 1)):
        for name, (high, odd, low, step, lane, tile) in in_fragments(token, channel).items():
            pages = torch.zeros(1, page.page_bytes, dtype=torch.uint8)
            codes = torch.zeros(1, 1, PAGE_TOKENS, head_dim)
            codes[0, 0, token, channel] = 4
            page.write(pages, f"{name}_codes", codes)
            code = low + 2 * (step % 2) + 4 * high + 8 * odd
            bit = 2 * code + step // 2 % 2
            word = step // 4 + near * (lane + 32 * tile)
            first = page.fields[f"{name}_codes_high"].offset + 4 * word
            assert pages.nonzero().tolist() == [[0, first + bit // 8]]
            assert int(pages[0, first + bit // 8]) == 1 << bit % 8


@pytest.mark.parametrize("page", STREAM_FORMATS, ids=name_of)
def test_each_byte_is_of_one_token(page: PageFormat) -> None:
    """A token that is written changes its own bytes and no others; the center's are nobody's."""
    owner = page.token_bytes(torch.device("cpu"))
    assert owner.shape == (page.page_bytes,) and owner.dtype == torch.int16
    tokens = [name for name in content(page, 1) if name != "center"]
    in_codes = torch.zeros(page.page_bytes, dtype=torch.bool)
    for start, stop in code_extents(page):
        in_codes[start:stop] = True
    for place in (0, 1, 15, 16, 77, 127):
        # All bits of the token's codes change, and some of its scales and zeros.
        before = torch.full((1, page.page_bytes), 0x3C, dtype=torch.uint8)
        after = before.clone()
        for name in tokens:
            array = page.read(before, name)
            bits = page.bits.keys if name.startswith("key") else page.bits.values
            is_code = page.fields[name].kind == "codes"
            array[:, :, place] = (1 << bits) - 1 - array[:, :, place] if is_code else -7.3
            page.write(after, name, array)
        touched = (after != before)[0]
        assert set(owner[touched].tolist()) == {place}
        assert torch.equal(touched & in_codes, (owner == place) & in_codes)
    per_token = torch.bincount(owner[owner >= 0].long(), minlength=PAGE_TOKENS)
    fields = [field for name, field in page.fields.items() if name != "center"]
    assert (per_token == sum(field.nbytes for field in fields) * page.kv_heads / PAGE_TOKENS).all()
    unowned = page.page_bytes - int(per_token.sum())
    padding = page.page_bytes - sum(stop - start for start, stop in extents(page))
    assert unowned == padding + page.center * page.kv_heads * page.head_dim * 2


def code_extents(page: PageFormat) -> list[tuple[int, int]]:
    """As ``extents``, of codes alone."""
    return [
        (
            head * page.head_bytes + field.offset,
            head * page.head_bytes + field.offset + field.nbytes,
        )
        for field in page.fields.values()
        if field.kind == "codes"
        for head in range(page.kv_heads)
    ]


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_the_center_comes_first_and_is_of_each_head(head_dim: int) -> None:
    page = PageFormat.of(STREAM, Bits(3, 2), 3, head_dim)
    assert next(iter(page.fields)) == "center" and page.fields["center"].offset == 0
    without = replace(page, center=False)
    assert page.head_bytes == without.head_bytes + 2 * head_dim
    assert page.bytes_by_kind["codes"] == without.bytes_by_kind["codes"]
    assert page.bytes_by_kind["scales"] == without.bytes_by_kind["scales"] + 3 * 2 * head_dim
    centers = torch.randn(2, 3, head_dim).half()
    pages = torch.full((2, page.page_bytes), 0xA5, dtype=torch.uint8)
    page.write(pages, "center", centers)
    assert torch.equal(page.read(pages, "center"), centers.float())
    changed = (pages != 0xA5).nonzero()[:, 1] % page.head_bytes
    assert changed.max() < 2 * head_dim


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_the_sign_of_a_scale_says_whether_the_center_is_added(head_dim: int) -> None:
    """Written by hand and read as keys in float64: scale * code + zero, and the center where the
    sign bit is set, that of -0 too."""
    policy = replace(STREAM, rotate=False)
    page = PageFormat.of(policy, Bits(3, 2), 2, head_dim)
    written = content(page, 3)
    signs = torch.randint(0, 2, written["key_scales"].shape).bool()
    scales = torch.rand(written["key_scales"].shape).half() + 0.1
    scales[0, 0, ::3] = 0
    zeros, center = torch.randn(scales.shape).half(), torch.randn(3, 2, head_dim).half()
    written |= {"key_scales": torch.where(signs, -scales, scales), "key_zeros": zeros}
    written["center"] = center
    pages = torch.zeros(3, page.page_bytes, dtype=torch.uint8)
    for name, array in written.items():
        page.write(pages, name, array)
    read = page.read(pages, "key_scales")
    assert torch.equal(read.signbit(), signs) and torch.equal(read.abs(), scales.float())
    keys, _ = unpack(pages, page, Basis(head_dim, False, None), torch.float32)
    groups = head_dim // scales.shape[-1]
    spread = lambda x: x.double().repeat_interleave(groups, -1)  # noqa: E731
    expected = spread(scales) * written["key_codes"] + spread(zeros)
    expected += spread(signs) * center.double()[:, :, None]
    torch.testing.assert_close(keys.double(), expected, rtol=1e-6, atol=1e-6)


def test_sizes_that_the_design_names() -> None:
    for key_group, head_bytes, bits in ((128, 9472, 2.3125), (64, 9984, 2.4375)):
        compact = PageFormat.of(KVPolicy.preset("channel", key_group=key_group), TWO, 8, 128)
        assert compact.head_bytes == head_bytes and compact.page_bytes == 8 * head_bytes
        assert compact.bits_per_value == bits
    assert PageFormat.of(KVPolicy.preset("channel"), TWO, 8, 128).bits_per_value < 2.45
    assert PageFormat.of(KVPolicy.preset("oscar"), TWO, 8, 128).bits_per_value <= 3.03


@given(st.integers(1, 300), st.sampled_from([32, 64, 128]))
@settings(max_examples=200)
def test_divided_group(channels: int, group: int) -> None:
    found = divided_group(group, channels)
    assert channels % found == 0 and found <= group
    assert not any(channels % larger == 0 for larger in range(found + 1, min(group, channels) + 1))


@pytest.mark.parametrize(
    ("keys", "values", "head_dim", "unit"),
    [
        *((2, 2, 66, 4), (2, 2, 1, 4), (4, 4, 65, 2), (4, 2, 66, 4)),
        # The high bits of eight codes of 3 fill a byte.
        *((3, 3, 68, 8), (3, 2, 68, 8), (4, 3, 4, 8)),
    ],
)
def test_codes_that_do_not_fill_bytes(keys: int, values: int, head_dim: int, unit: int) -> None:
    with pytest.raises(InputError, match=rf"head_dim={head_dim}: .* multiple of {unit}:.*bf16"):
        PageFormat.of(KVPolicy.preset("channel"), Bits(keys, values), 2, head_dim)
