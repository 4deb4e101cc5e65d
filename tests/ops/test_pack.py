"""pack: pages of real keys and values, from new tokens and from those in 16-bit precision."""

from dataclasses import replace

import pytest
import torch

from oscar_mm import KVPolicy
from oscar_mm.ops import store_torch
from oscar_mm.ops.library import recipe_numbers, sigma_of
from oscar_mm.ops.pack import pack, pack_jobs
from oscar_mm.ops.samples import JOB_SLOTS, random_basis, random_jobs
from oscar_mm.ops.unpack import unpack
from oscar_mm.pages import quantize
from oscar_mm.pages.layout import PageFormat
from oscar_mm.pages.quantize import Recipe, unpack_stored
from oscar_mm.policy import Bits
from oscar_mm.quant.basis import Basis
from tests.ops.arguments import channel_policy, stream_policy
from tests.pairs import pairs

POLICIES = {
    "channel": channel_policy(),
    "oscar": KVPolicy.preset("oscar"),
    "kivi": KVPolicy.preset("kivi"),
    "quarot": KVPolicy.preset("quarot"),
    "stream": stream_policy(),
}
CHANNEL = ("channel", "oscar", "kivi")


def pages_of(
    name: str, count: int = 3, kv_heads: int = 2, head_dim: int = 64, bits: int = 2
) -> tuple[torch.Tensor, torch.Tensor, PageFormat, KVPolicy, Basis]:
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, count, kv_heads, 128, head_dim, generator=generator)
    policy = POLICIES[name]
    sigma = torch.rand(kv_heads, head_dim, generator=generator) + 0.5
    basis = Basis(head_dim, policy.rotate, sigma if name == "channel" else None)
    return keys, values, PageFormat.of(policy, Bits(bits, bits), kv_heads, head_dim), policy, basis


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("name", POLICIES)
def test_page_holds_what_the_layout_says(name: str, bits: int) -> None:
    """Reading the fields by hand, as the layout describes them, gives what unpack gives."""
    keys, values, page, policy, basis = pages_of(name, bits=bits)
    packed = pack(keys, values, page, policy, basis)
    assert packed.shape == (3, page.page_bytes) and packed.dtype == torch.uint8
    arrays = {name: page.read(packed, name) for name in page.fields if "high" not in name}
    stored_keys, stored_values = unpack_stored(packed, page)
    for at in [(0, 0, 0, 0), (1, 1, 77, 33), (2, 0, 127, 63)]:
        n, head, token, channel = at
        code = arrays["key_codes"][at]
        if policy.key_axis == "channel":
            group = (n, head, token // policy.key_group, channel)
        else:
            group = (n, head, token, channel // page.key_group)
        scale, center = arrays["key_scales"][group], 0.0
        if policy.center:
            center = arrays["center"][n, head, channel] if scale.signbit() else 0.0
            scale = scale.abs()
        expected = scale * code + arrays["key_zeros"][group] + center
        if policy.token_scaling == "per_head":
            expected *= arrays["norms"][n, head, token]
        elif policy.token_scaling == "shared":
            expected *= arrays["norms"][n, token]
        assert stored_keys[at] == pytest.approx(float(expected), rel=1e-5, abs=1e-6)
        code = arrays["value_codes"][at]
        group = (n, head, token, channel // page.value_group)
        expected = arrays["value_scales"][group] * code + arrays["value_zeros"][group]
        assert stored_values[at] == pytest.approx(float(expected), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", POLICIES)
def test_pages_do_not_depend_on_each_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, values, page, policy, basis = pages_of(name, count=5)
    together = pack(keys, values, page, policy, basis)
    for n in range(5):
        alone = pack(keys[n : n + 1], values[n : n + 1], page, policy, basis)
        assert torch.equal(alone[0], together[n])
    monkeypatch.setattr(quantize, "_CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(store_torch, "_JOBS_AT_ONCE", 3)
    assert torch.equal(pack(keys, values, page, policy, basis), together)
    assert pack(keys[:0], values[:0], page, policy, basis).shape == (0, page.page_bytes)


@pytest.mark.parametrize("bits", [2, 4])
def test_unbiased_values_have_the_same_codes(bits: int) -> None:
    """Only their scales and zeros differ, by which they are as long as they were, on average."""
    keys, values, page, policy, basis = pages_of("channel", bits=bits)
    found = {
        name: pack(keys, values, page, replace(policy, value_scale=name), basis)
        for name in ("plain", "unbiased")
    }
    changed = {"value_scales", "value_zeros"}
    for field in page.fields:
        plain, unbiased = (page.read(packed, field) for packed in found.values())
        assert torch.equal(plain, unbiased) == (field not in changed)
    shares = []
    for packed in found.values():
        read = unpack(packed, page, basis, torch.float32)[1]
        shares.append(float((read * values).sum() / values.square().sum()))
    assert shares[0] < (0.95 if bits == 2 else 0.998) < 0.999 < shares[1] < 1.001


@pytest.mark.parametrize("token_scaling", ["per_head", "shared", None])
@pytest.mark.parametrize("bits", [2, 4])
def test_what_distinguishes_keys_does_not_shrink(bits: int, token_scaling: str | None) -> None:
    """Most of these keys is the mean of all, which zero points hold without a loss."""
    keys, values, page, policy, basis = pages_of("channel", bits=bits)
    keys = keys + 3 * torch.randn(1, keys.shape[1], 1, keys.shape[3])
    shares, codes = {}, {}
    for norm in ("plain", "unbiased"):
        changed = replace(policy, norm=norm, token_scaling=token_scaling)
        page = PageFormat.of(changed, Bits(bits, bits), keys.shape[1], keys.shape[3])
        packed = pack(keys, values, page, changed, basis)
        apart = keys - keys.mean(2, keepdim=True)
        read = unpack(packed, page, basis, torch.float32)[0]
        shares[norm] = float((read * apart).sum() / apart.square().sum())
        codes[norm] = page.read(packed, "key_codes")
    assert torch.equal(codes["plain"], codes["unbiased"])
    assert shares["plain"] < (0.93 if bits == 2 else 0.997)
    assert abs(shares["unbiased"] - 1) < (0.01 if bits == 2 else 0.002)


@pytest.mark.parametrize("name", POLICIES)
def test_strides_and_dtypes(name: str) -> None:
    keys, values, page, policy, basis = pages_of(name)
    expected = pack(keys, values, page, policy, basis)
    for x in (keys, values):
        x.copy_(x.bfloat16())
    expected = pack(keys, values, page, policy, basis)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (keys, values)]
    assert torch.equal(pack(*strided, page, policy, basis), expected)
    halves = [x.bfloat16() for x in (keys, values)]
    assert torch.equal(pack(*halves, page, policy, basis), expected)


def test_unpack_is_in_the_models_coordinates() -> None:
    keys, values, page, policy, basis = pages_of("channel", bits=4)
    packed = pack(keys, values, page, policy, basis)
    for found, given in zip(
        unpack(packed, page, basis, torch.float16), (keys, values), strict=True
    ):
        assert found.dtype == torch.float16 and found.shape == given.shape
        assert (found.float() - given).norm() < 0.15 * given.norm()


def test_float16_limits() -> None:
    keys, values, page, policy, basis = pages_of("kivi")
    for limit, fine in ((6e4, True), (7e4, False)):
        big = values.clone()
        big[1] = limit
        if fine:
            assert (
                unpack(pack(keys, big, page, policy, basis), page, basis, torch.float32)[1].max()
                > 5e4
            )
        else:
            with pytest.raises(FloatingPointError, match="65504"):
                pack(keys, big, page, policy, basis)


def test_shapes_that_do_not_fit() -> None:
    keys, values, page, policy, basis = pages_of("channel")
    for bad in (keys[:, :, :127], keys[:, :1], keys[..., :32]):
        with pytest.raises(ValueError, match=r"pages, 2, 128, 64"):
            pack(bad, values, page, policy, basis)
    with pytest.raises(ValueError, match="must both be"):
        pack(keys, values[:2], page, policy, basis)


def run_jobs(jobs: tuple, page: PageFormat, policy: KVPolicy, basis: Basis) -> tuple:
    """Pages, 255 where nothing is written, and the flag."""
    pages = torch.full((JOB_SLOTS, page.page_bytes), 255, dtype=torch.uint8)
    bad = torch.zeros(1, dtype=torch.int32)
    recipe = recipe_numbers(Recipe.of(page, policy))
    pack_jobs(*jobs, pages, bad, basis.sigma, recipe)
    return pages, bad


@pytest.mark.parametrize(
    ("name", "chunk", "dtype", "rows"),
    pairs(CHANNEL, (1, 1 << 22), (torch.float32, torch.bfloat16), ((), (2,))),
)
def test_jobs(
    name: str,
    rows: tuple[int, ...],
    dtype: torch.dtype,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens are where the list says; a page is what whole-page packing makes of them."""
    monkeypatch.setattr(quantize, "_CHUNK_ELEMENTS", chunk)
    _, _, page, policy, basis = pages_of(name)
    if rows:
        basis = random_basis(page, policy.rotate, torch.device("cpu"), rows)
    jobs = random_jobs(page, dtype, torch.device("cpu"))
    pages, bad = run_jobs(jobs, page, policy, basis)
    assert not bad
    keys, values, recent, source, row_of, slots = jobs
    for job, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        tokens, row = ([], []), int(row_of[job])
        for at in source[job].tolist():
            for side, states in enumerate((keys, values)):
                if at >= 0:
                    tokens[side].append(states[row, :, at])
                else:
                    tokens[side].append(recent[~at, side])
        whole = (torch.stack(side, dim=1)[None] for side in tokens)
        alone = replace(basis, sigma=sigma_of(basis.sigma, row))
        assert torch.equal(pages[slot], pack(*whole, page, policy, alone)[0])
    untouched = set(range(JOB_SLOTS)) - set(slots.tolist())
    assert untouched and all((pages[slot] == 255).all() for slot in untouched)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("where", ["keys", "values", "recent"])
def test_flag(where: str, wrong: float) -> None:
    _, _, page, policy, basis = pages_of("channel")
    jobs = random_jobs(page, torch.float32, torch.device("cpu"))
    keys, values, recent, source, _, slots = jobs
    stored = ~int(source[1, 5])
    place = {
        "keys": (keys, (0, 1, 77, 9)),
        "values": (values, (1, 0, int(source[4, 3]), 0)),
        "recent": (recent, (stored, 1, 0, 9)),
    }
    tensor, at = place[where]
    tensor[at] = wrong
    pages, bad = run_jobs(jobs, page, policy, basis)
    assert bad.tolist() == [1] and len(pages)
    # Of a job that does nothing, nothing is looked at.
    slots[:] = -1
    pages, bad = run_jobs(jobs, page, policy, basis)
    assert not bad and (pages == 255).all()


def test_no_jobs() -> None:
    _, _, page, policy, basis = pages_of("channel")
    *states, source, rows, slots = random_jobs(page, torch.float32, torch.device("cpu"))
    pages, bad = run_jobs((*states, source[:0], rows[:0], slots[:0]), page, policy, basis)
    assert (pages == 255).all() and not bad
