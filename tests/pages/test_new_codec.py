"""A page format in one file: NF4, and two of its kind, which oscar_mm does not know."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, DynamicCache, PreTrainedModel

from oscar_mm import InputError, KVPolicy, OscarCache, OscarVLPipeline
from oscar_mm.cache.block_table import min_page_tokens
from oscar_mm.cache.cache import as_argument
from oscar_mm.cache.saved_cache import load_cache, save_cache
from oscar_mm.ops.library import format_of, numbers_of
from oscar_mm.ops.pack import pack
from oscar_mm.ops.unpack import unpack
from oscar_mm.pages.codecs import registry
from oscar_mm.pages.codecs.base import Array, Arrays, Fitting, PageCodec, PageShape
from oscar_mm.pages.codecs.registry import register_codec
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat
from oscar_mm.policy import KEY_AXES, Bits
from oscar_mm.quant.basis import Basis
from tests.cache.invariants import attend_oscar, chunk
from tests.checkpoints import build_decoder
from tests.prompts import noise

NF4 = (
    *(-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0),
    *(0.07958030, 0.16093020, 0.24611230, 0.33791524, 0.44070983, 0.56261700, 0.72295684, 1.0),
)
"""Levels of 4-bit NormalFloat (QLoRA, arXiv:2305.14314)."""


class NormalFloat(PageCodec):
    """Codes of levels between -1 and 1, times the largest absolute value of a token."""

    key_axis: ClassVar[str] = "nf4"
    levels: ClassVar[torch.Tensor] = torch.tensor(NF4)
    key_scales: ClassVar[Array] = Array("key_scales", (PAGE_TOKENS, 1))
    key_dim: ClassVar[int] = -1

    def arrays(self, page: PageShape) -> list[Array]:
        bits = len(self.levels).bit_length() - 1
        keys, values = (Array.codes(f"{x}_codes", page.head_dim, bits) for x in ("key", "value"))
        scales = self.key_scales
        if self.key_dim == -2:
            scales = scales._replace(shape=(1, page.head_dim))
        return [keys, scales, values, Array("value_scales", (PAGE_TOKENS, 1))]

    def check(self, page: PageShape) -> None:
        super().check(page)
        if page.bits != Bits(4, 4):
            raise InputError(f"bits={page.bits}: pages of key_axis {self.key_axis!r} have 4 bits")

    def encode(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        page: PageShape,
        fitting: Fitting,
        basis: Basis,
        centers: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        key_codes, key_scales = self._coded(basis.keys_in(keys), self.key_dim)
        value_codes, value_scales = self._coded(basis.values_in(values), -1)
        return {
            "key_codes": key_codes,
            "key_scales": key_scales,
            "value_codes": value_codes,
            "value_scales": value_scales,
        }

    def _coded(self, x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        scales = x.abs().amax(dim, keepdim=True).half().float()
        middles = (self.levels[1:] + self.levels[:-1]).to(x.device) / 2
        return torch.bucketize(x / scales.clamp(min=1e-7), middles), scales

    def decode(self, arrays: Arrays, page: PageShape) -> tuple[torch.Tensor, torch.Tensor]:
        levels = self.levels.to(arrays["key_codes"].device)
        keys, values = (
            levels[arrays[f"{side}_codes"].long()] * arrays[f"{side}_scales"]
            for side in ("key", "value")
        )
        return keys, values


class Integers(NormalFloat):
    """8-bit integers, times the largest absolute value of a token."""

    key_axis: ClassVar[str] = "int8"
    levels: ClassVar[torch.Tensor] = torch.linspace(-1, 1, 256)


class NormalFloatPages(NormalFloat):
    """NF4 with keys per channel: pages are written as a whole."""

    key_axis: ClassVar[str] = "nf4_pages"
    appends_tokens: ClassVar[bool] = False
    key_scales: ClassVar[Array] = Array("key_scales", (), of_tokens=False)
    key_dim: ClassVar[int] = -2


class Floats(NormalFloat):
    """8-bit floats, which are numbers of the page and no codes, times a token's largest value."""

    key_axis: ClassVar[str] = "fp8"

    def arrays(self, page: PageShape) -> list[Array]:
        shape, scales = (PAGE_TOKENS, page.head_dim), (PAGE_TOKENS, 1)
        return [
            Array("key_codes", shape, torch.float8_e4m3fn, "codes"),
            Array("value_codes", shape, torch.float8_e4m3fn, "codes"),
            *(Array("key_scales", scales, torch.bfloat16), Array("value_scales", scales)),
        ]

    def _coded(self, x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        scales = x.abs().amax(dim, keepdim=True).bfloat16().float()
        return x / scales.clamp(min=1e-7), scales.half()

    def decode(self, arrays: Arrays, page: PageShape) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (arrays[f"{x}_codes"] * arrays[f"{x}_scales"] for x in ("key", "value"))
        return keys, values


CODECS = (NormalFloat, Integers, NormalFloatPages, Floats)
BYTES = {
    "nf4": 2 * (128 * 32 + 256),
    "int8": 2 * (128 * 64 + 256),
    "nf4_pages": 2 * 128 * 32 + 128 + 256,
    "fp8": 2 * (128 * 64 + 256),
}
"""Bytes of a page of one head with 64 channels: codes, and scales of keys and values."""


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Registered as by ``@register_codec``, for one test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_CODECS", dict(registry._CODECS))
        assert [register_codec(codec) for codec in CODECS] == [*CODECS]
        yield
    for codec in CODECS:
        del KEY_AXES[codec.key_axis]


def policy_of(codec: type[PageCodec], **changes: Any) -> KVPolicy:
    how = {"bits": 4, "key_axis": codec.key_axis, "center": False, "window": 0, "sinks": 0}
    return KVPolicy(**(how | {"balance": None} | changes))


def rotation(size: int) -> torch.Tensor:
    """Signs of a Hadamard matrix by the parity of common bits, normalized."""
    signs = [[(-1) ** (row & column).bit_count() for column in range(size)] for row in range(size)]
    return torch.tensor(signs).double() / size**0.5


def restored(codec: type[PageCodec], x: torch.Tensor, is_key: bool) -> torch.Tensor:
    """(batch, heads, tokens, d) as a page would return them: the nearest of all levels, in float64.

    The tokens of pages of keys per channel must be whole pages.
    """
    matrix = rotation(x.shape[-1])
    turned = x.bfloat16().double() @ matrix
    if is_key and codec.key_dim == -2:
        pages = turned.unflatten(2, (-1, PAGE_TOKENS))
        sizes = pages.abs().amax(3, keepdim=True).expand_as(pages).flatten(2, 3)
    else:
        sizes = turned.abs().amax(-1, keepdim=True)
    sizes = sizes.bfloat16().double() if codec is Floats else sizes.half().double()
    share = turned / sizes
    if codec is Integers:
        nearest = ((share + 1) * 127.5).round().clamp(0, 255) / 127.5 - 1
    elif codec is Floats:
        nearest = share.to(torch.float8_e4m3fn).double()
    else:
        apart = torch.stack([(share - level).abs() for level in NF4])
        nearest = torch.tensor(NF4).double()[apart.argmin(0)]
    return (nearest * sizes @ matrix).float()


class Restored(DynamicCache):
    """Transformers' cache; tokens that have been attended to are replaced by restored ones."""

    def __init__(self, codec: type[PageCodec]) -> None:
        super().__init__()
        self._codec = codec

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_, **__
    ):
        both = super().update(key_states, value_states, layer_idx)
        layer, count = self.layers[layer_idx], key_states.shape[2]
        layer.keys, layer.values = (
            torch.cat([side[:, :, :-count], self._stored(new, side is both[0])], dim=2)
            for side, new in zip(both, (key_states, value_states), strict=True)
        )
        return both

    def _stored(self, x: torch.Tensor, is_key: bool) -> torch.Tensor:
        if not self._codec.appends_tokens and x.shape[2] % PAGE_TOKENS:
            return x.bfloat16().float()
        return restored(self._codec, x, is_key)


@pytest.fixture(scope="module")
def decoder() -> PreTrainedModel:
    return build_decoder("qwen3")


def ids_of(tokens: int) -> torch.Tensor:
    return torch.randint(3, 300, (1, tokens), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("codec", CODECS)
def test_bytes(codec: type[PageCodec]) -> None:
    policy = policy_of(codec)
    page_format = PageFormat.of(policy, Bits(4, 4), 3, 64)
    assert page_format.page_bytes == 3 * BYTES[codec.key_axis]
    assert format_of(numbers_of(page_format)) == page_format
    least = min_page_tokens(policy, Bits(4, 4))
    assert least == (-(-BYTES[codec.key_axis] // 256) if codec.appends_tokens else PAGE_TOKENS)


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("codec", CODECS)
def test_pages_keep_what_the_levels_can(codec: type[PageCodec], head_dim: int) -> None:
    policy = policy_of(codec)
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 3, 2, PAGE_TOKENS, head_dim, generator=generator)
    page_format = PageFormat.of(policy, Bits(4, 4), 2, head_dim)
    basis = Basis(head_dim, True, torch.rand(2, head_dim, generator=generator) + 0.5)
    pages = pack(keys, values, page_format, policy, basis)
    found = unpack(pages, page_format, basis, torch.float32)
    bound = {Integers: 0.01, Floats: 0.04}.get(codec, 0.12)
    for side, given in zip(found, (keys, values), strict=True):
        assert 1e-4 < (side - given).norm() / given.norm() < bound
    with pytest.raises(FloatingPointError, match="65504"):
        pack(keys, values * 1e6, page_format, policy, basis)


@pytest.mark.daily("NormalFloat", "NormalFloatPages")
@pytest.mark.parametrize("codec", CODECS)
def test_generation_is_that_of_an_unpacked_copy(codec: type[PageCodec], decoder) -> None:
    """All layers, decode steps and pages that grow; both in float32."""
    ids, found = ids_of(2 * PAGE_TOKENS + (70 if codec.appends_tokens else 0)), []
    options = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False}
    cache = OscarCache(policy_of(codec))
    for past, implementation in ((cache, "oscar"), (Restored(codec), "sdpa")):
        decoder.set_attn_implementation(implementation)
        options |= {"output_logits": True, "return_dict_in_generate": True, **as_argument(past)}
        found.append(decoder.generate(ids, **options))
    ours, reference = found
    assert torch.equal(ours.sequences, reference.sequences)
    for mine, theirs in zip(ours.logits, reference.logits, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-3 * float(theirs.abs().max()))
    [stream] = cache.kv_manager.sequences[0].streams.values()
    assert stream.packed == (ids.shape[1] + 23 if codec.appends_tokens else ids.shape[1])


@pytest.mark.parametrize("codec", CODECS)
def test_saved_and_loaded(codec: type[PageCodec], tmp_path: Path) -> None:
    """With forgotten tokens, whose places are cleared where tokens are written one by one."""
    policy, path = policy_of(codec, window=8, sinks=2), tmp_path / "cache"
    cache = OscarCache(policy)
    attend_oscar(cache, chunk(0, 400))
    cache.forget(20, 40)
    save_cache(cache, path, fingerprint="a model")
    other, _ = load_cache(path, fingerprint="a model")
    for found, expected in zip(other.unpacked(0), cache.unpacked(0), strict=True):
        assert torch.equal(found, expected)
    [stream] = [one for one in other.kv_manager.sequences[0].streams.values() if one.pages]
    pages, is_used = other.layers[0].pages[Bits(4, 4)].storage, torch.zeros(4, PAGE_TOKENS)
    for page, start, stop in zip(stream.pages, stream.starts, stream.stops, strict=True):
        is_used[page, start:stop] = 1
    owners = other.layers[0].formats[Bits(4, 4)].token_bytes(pages.device).long()
    forgotten = pages[is_used[: len(pages)][:, owners] == 0]
    assert len(forgotten) and bool(forgotten.any()) != codec.appends_tokens
    new = chunk(1, 1)
    assert torch.equal(attend_oscar(other, new), attend_oscar(cache, new))
    del KEY_AXES[codec.key_axis]
    with pytest.raises(InputError, match=f"key_axis='{codec.key_axis}': must be one of 'channel'"):
        load_cache(path, fingerprint="a model")
    KEY_AXES[codec.key_axis] = codec.limits


@pytest.mark.daily("Integers")
@pytest.mark.parametrize("codec", CODECS)
def test_chat_with_an_image(codec: type[PageCodec], qwen3_vl_folder: Path, tmp_path: Path) -> None:
    policy = policy_of(codec, balance="weights", window=16, sinks=4)
    pipe = OscarVLPipeline(qwen3_vl_folder, policy=policy, device="cpu")
    chat, path = pipe.chat(), tmp_path / "chat"
    chat.ask("What is it? " * 20, [noise(400, 300)], max_new_tokens=8)
    chat.save(path)
    answer = chat.ask("And this?", max_new_tokens=8)
    assert answer.memory.kv_bytes < answer.memory.bf16_bytes
    other = OscarVLPipeline(qwen3_vl_folder, policy=policy, device="cpu").load_chat(path)
    again = other.ask("And this?", max_new_tokens=8)
    assert again.token_ids == answer.token_ids and again.memory == answer.memory


def test_pipeline_answers_like_an_unpacked_copy(llava_next_folder: Path) -> None:
    pipe = OscarVLPipeline(llava_next_folder, policy=policy_of(NormalFloat), device="cpu")
    prompt = "Which month was the wettest, and why? " * 6
    answer = pipe([], prompt, max_new_tokens=16)
    processor = AutoProcessor.from_pretrained(llava_next_folder)
    model = AutoModelForImageTextToText.from_pretrained(llava_next_folder, dtype=torch.float32)
    turn = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
    text = processor.apply_chat_template(turn, add_generation_prompt=True)
    inputs = processor(text=[text], return_tensors="pt")
    assert answer.prompt_tokens == inputs["input_ids"].shape[1] > 40
    past = as_argument(Restored(NormalFloat))
    made = model.eval().generate(**inputs, **past, max_new_tokens=16, do_sample=False)
    assert answer.token_ids == made[0, answer.prompt_tokens :].tolist()[: len(answer.token_ids)]
    assert len(answer.token_ids) > 2


def test_policies() -> None:
    assert KVPolicy.preset("standard:key_axis=nf4,bits=4,center=false").key_axis == "nf4"
    with pytest.raises(InputError, match="center=True with key_axis='nf4': must be False"):
        KVPolicy(key_axis="nf4", bits=4)
    with pytest.raises(InputError, match="key_axis='nf5': must be one of 'channel', 'token', 'nf4"):
        KVPolicy(key_axis="nf5")
    with pytest.raises(InputError, match="bits=3: pages of key_axis 'nf4' have 4 bits"):
        PageFormat.of(policy_of(NormalFloat, bits=3), Bits(3, 3), 2, 64)


def test_a_key_axis_has_one_format() -> None:
    class Other(NormalFloat):
        key_axis = "token"

    with pytest.raises(ValueError, match="Other: StreamCodec already has key_axis 'token'"):
        register_codec(Other)
