"""pack and unpack: pages of real keys and values."""

import pytest
import torch

from oscar_mm import KVPolicy
from oscar_mm.cache.layout import PageFormat
from oscar_mm.ops import pack as pack_module
from oscar_mm.ops.pack import pack
from oscar_mm.ops.unpack import unpack, unpack_stored
from oscar_mm.quant.basis import Basis

PRESETS = ("compact", "oscar", "kivi", "quarot")


def pages_of(
    name: str, count: int = 3, kv_heads: int = 2, head_dim: int = 64, bits: int = 2
) -> tuple[torch.Tensor, torch.Tensor, PageFormat, KVPolicy, Basis]:
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, count, kv_heads, 128, head_dim, generator=generator)
    policy = KVPolicy.preset(name)
    sigma = torch.rand(kv_heads, head_dim, generator=generator) + 0.5
    basis = Basis(head_dim, policy.rotate, sigma if name == "compact" else None)
    return keys, values, PageFormat.of(policy, bits, kv_heads, head_dim), policy, basis


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("name", PRESETS)
def test_page_holds_what_the_layout_says(name: str, bits: int) -> None:
    """Reading the fields by hand, as the layout describes them, gives what unpack gives."""
    keys, values, page, policy, basis = pages_of(name, bits=bits)
    packed = pack(keys, values, page, policy, basis)
    assert packed.shape == (3, page.page_bytes) and packed.dtype == torch.uint8
    arrays = {name: page.read(packed, name) for name in page.fields}
    stored_keys, stored_values = unpack_stored(packed, page)
    for at in [(0, 0, 0, 0), (1, 1, 77, 33), (2, 0, 127, 63)]:
        n, head, token, channel = at
        code = arrays["key_codes"][at]
        if policy.key_axis == "channel":
            group = (n, head, token // policy.key_group, channel)
        else:
            group = (n, head, token, channel // page.key_group)
        expected = arrays["key_scales"][group] * code + arrays["key_zeros"][group]
        if policy.token_scaling == "per_head":
            expected *= arrays["norms"][n, head, token]
        elif policy.token_scaling == "shared":
            expected *= arrays["norms"][n, token]
        assert stored_keys[at] == pytest.approx(float(expected), rel=1e-5, abs=1e-6)
        code = arrays["value_codes"][at]
        group = (n, head, token, channel // page.value_group)
        expected = arrays["value_scales"][group] * code + arrays["value_zeros"][group]
        assert stored_values[at] == pytest.approx(float(expected), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", PRESETS)
def test_pages_do_not_depend_on_each_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, values, page, policy, basis = pages_of(name, count=5)
    together = pack(keys, values, page, policy, basis)
    for n in range(5):
        alone = pack(keys[n : n + 1], values[n : n + 1], page, policy, basis)
        assert torch.equal(alone[0], together[n])
    monkeypatch.setattr(pack_module, "_CHUNK_ELEMENTS", 1)
    assert torch.equal(pack(keys, values, page, policy, basis), together)
    assert pack(keys[:0], values[:0], page, policy, basis).shape == (0, page.page_bytes)


@pytest.mark.parametrize("name", PRESETS)
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
    keys, values, page, policy, basis = pages_of("compact", bits=4)
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
    keys, values, page, policy, basis = pages_of("compact")
    for bad in (keys[:, :, :127], keys[:, :1], keys[..., :32]):
        with pytest.raises(ValueError, match=r"pages, 2, 128, 64"):
            pack(bad, values, page, policy, basis)
    with pytest.raises(ValueError, match="must both be"):
        pack(keys, values[:2], page, policy, basis)
