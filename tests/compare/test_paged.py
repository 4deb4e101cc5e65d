"""What a method gives back is what a cache or an engine stores, and its bits are the pages'."""

from dataclasses import replace

import pytest
import torch

from oscar_mm import KVPolicy, OscarCache
from oscar_mm.compare.methods import ablation_methods, block_methods, main_methods
from oscar_mm.compare.paged import Blocks, Paged, cached
from oscar_mm.compare.teacher_forcing import LayerStates, Recorder
from oscar_mm.modality import Modality
from tests.compare.states import HEAD_DIM, IDS, KV_HEADS, states
from tests.vllm_plugin.requests import Layer

METHODS = [one for one in (*main_methods(), *ablation_methods()) if isinstance(one, Paged)]
BY_TOKEN = {"key_axis": "token", "token_scaling": None}
STREAM = KVPolicy(bits=(3, 2), center=True, **BY_TOKEN)
STREAMS = {
    "3/2 with center": STREAM,
    "3/2 without": replace(STREAM, center=False),
    "plain fit": replace(STREAM, fit="minmax", norm="plain", value_scale="plain"),
    "no balance, no rotation": replace(STREAM, balance=None, rotate=False),
    "by modality": replace(STREAM, bits={"text": 16, "image": (4, 2)}),
    "two formats": replace(
        STREAM, bits={"text": (2, 3), "image": (4, 2), "video": 16, "audio": 16}
    ),
    "no window": replace(STREAM, window=0, sinks=0),
    "window of 100": replace(STREAM, window=100, sinks=64),
    "groups of 32": replace(STREAM, key_group=32, value_group=32),
    "short": replace(STREAM, window=300),
}
PURE = [one for one in METHODS if not one.mixed and not one.missing(states(1, normed=True), IDS)]


@pytest.mark.parametrize(
    ("method", "normed"),
    [*((method, True) for method in PURE), *((method, False) for method in PURE[::6])],
    ids=lambda value: getattr(value, "name", value),
)
def test_restored_is_what_the_cache_unpacks(method: Paged, normed: bool) -> None:
    layers = states(3, normed=normed)
    back = method.restored(layers[0], IDS)
    real = cached(method, layers, IDS).unpacked(0)
    assert torch.equal(back.keys[:1], real[0]) and torch.equal(back.values[:1], real[1])
    # Rows do not know of each other.
    first = replace(layers[0], keys=layers[0].keys[:1], values=layers[0].values[:1])
    alone = method.restored(first, IDS)
    assert torch.equal(alone.keys, back.keys[:1]) and torch.equal(alone.values, back.values[:1])


@pytest.mark.parametrize(
    ("name", "normed"),
    [*((name, True) for name in STREAMS), ("3/2 with center", False), ("two formats", False)],
)
def test_restored_of_stream_pages_is_what_the_cache_unpacks(name: str, normed: bool) -> None:
    """All rows are compared, including tokens outside full pages."""
    method, layers = Paged(name, STREAMS[name]), states(3, normed=normed)
    back = method.restored(layers[0], IDS)
    cache = cached(method, layers, IDS)
    real = cache.unpacked(0)
    assert torch.equal(back.keys[:1], real[0]) and torch.equal(back.values[:1], real[1])
    first = replace(layers[0], keys=layers[0].keys[:1], values=layers[0].values[:1])
    alone = method.restored(first, IDS)
    assert torch.equal(alone.keys, back.keys[:1]) and torch.equal(alone.values, back.values[:1])
    # What is packed is lossy, the rest exact; the same tokens as in the cache.
    exact = (back.keys == layers[0].keys) & (back.values == layers[0].values)
    exact = exact.all(-1).all(1)[0]
    packed = torch.zeros(len(IDS), dtype=torch.bool)
    for modality, places in method.packed(IDS).items():
        assert (IDS[places] == int(modality)).all()
        packed[places] = True
    streams = list(cache.kv_manager.streams())
    assert 0 < int(packed.sum()) == sum(stream.packed for stream in streams)
    assert torch.equal(packed, ~exact)
    pools = cache.store.layers[0].pages
    # Of each page the part that is in use.
    held = sum(3 * one.packed * pools[one.bits].slot_bytes // 128 for one in streams if one.pages)
    assert back.stored_bytes == held


@pytest.mark.parametrize("pieces", [(490,), (200, 290), (400, *[1] * 90), (150, 7, 143, 100, 90)])
def test_stream_pages_are_the_same_however_tokens_come(pieces: tuple[int, ...]) -> None:
    """Bit for bit what ``Paged`` gives back of the whole prompt, however many tokens a step has: a
    token is quantized by itself, and a page's center is of the same tokens."""
    policy = replace(STREAM, balance=None)
    [layer] = states(1)
    back = Paged("x", policy).restored(layer, IDS)
    cache, first = OscarCache(policy), 0
    for count in pieces:
        cache.expect(IDS[None, first : first + count])
        cache.update(*(x[:, :, first : first + count] for x in (layer.keys, layer.values)), 0)
        first += count
    real = cache.unpacked(0)
    assert torch.equal(back.keys, real[0]) and torch.equal(back.values, real[1])


@pytest.mark.gpu
@pytest.mark.parametrize("method", PURE, ids=lambda method: method.name)
def test_restored_is_what_the_kernels_unpack(method: Paged) -> None:
    layers = states(3, device="cuda")
    if method.missing(layers, IDS):
        pytest.skip(method.missing(layers, IDS))
    back = method.restored(layers[0], IDS)
    real = cached(method, layers, IDS).unpacked(0)
    assert torch.equal(back.keys[:1], real[0]) and torch.equal(back.values[:1], real[1])


@pytest.mark.parametrize("window", [0, 32, 128])
@pytest.mark.parametrize("sinks", [0, 4, 64])
def test_the_same_tokens_are_packed_as_in_the_cache(window: int, sinks: int) -> None:
    method = Paged("x", KVPolicy.preset("channel", window=window, sinks=sinks))
    layers = states(1)
    real = cached(method, layers, IDS).unpacked(0)[0]
    exact = (real == layers[0].keys).all(-1).all(1)[0]
    packed = torch.zeros(len(IDS), dtype=torch.bool)
    for modality, places in method.packed(IDS).items():
        assert (IDS[places] == int(modality)).all() and len(places) % 128 == 0
        packed[places] = True
    assert torch.equal(packed, ~exact)


def test_the_16_bit_method_gives_back_what_was_recorded() -> None:
    [layer] = states(2)
    back = METHODS[0].restored(layer, IDS)
    assert torch.equal(back.keys, layer.keys) and torch.equal(back.values, layer.values)
    assert back.stored_bytes == back.stored_values == 0


# By hand, of a page with 2 heads of 128: bytes over 65,536 values.
BYTES_OF_A_HEAD = {
    "INT2 per token": 2 * 4096 + 2 * 128 * 2 * 2,
    "QuaRot": 2 * 4096 + 2 * 128 * 2 * 2,
    "KIVI": 2 * 4096 + 2 * 4 * 128 * 2 * 2,
    "OScaR, published": 2 * 4096 + 2 * 4 * 128 * 2 * 2 + 128,  # norms shared by two heads
    "channel": 2 * 4096 + (128 // KVPolicy.preset("channel").key_group + 1) * 128 * 2 * 2 + 256,
    "standard": 6144 + 4096 + 2 * 128 * 2 * 2 + 256,
    "compact": 2 * 4096 + 2 * 128 * 2 * 2 + 256,
    "standard, center False": 6144 + 4096 + 2 * 128 * 2 * 2,
    "channel, groups 32": 2 * 4096 + 2 * 4 * 128 * 2 * 2 + 256,
}


@pytest.mark.parametrize("name", BYTES_OF_A_HEAD)
def test_bits_are_those_counted_by_hand(name: str) -> None:
    method = next(one for one in METHODS if one.name == name)
    recorder = Recorder(torch.nn.Module())
    keys = torch.randn(2, 2, 330, 128)
    queries = torch.randn(2, 4, 330, 128)
    recorder.cache.look(0, torch.nn.Module(), queries, keys, keys, 1.0)
    back = method.restored(recorder.layers[0], torch.ones(330, dtype=torch.int8))
    # Of each of two rows two pages; of tokens 294 are packed, which is a part of a third one.
    tokens = 294 if method.policy.key_axis == "token" else 256
    assert back.stored_values == 2 * 2 * 128 * 2 * tokens
    assert back.stored_bytes == 2 * 2 * BYTES_OF_A_HEAD[name] * tokens // 128


def test_mixed_pages_are_pages_in_the_order_of_the_prompt() -> None:
    ids = torch.tensor([0, 1] * 150, dtype=torch.int8)
    pure = Paged("pure", KVPolicy.preset("channel", window=0, sinks=0))
    mixed = replace(pure, mixed=True)
    assert {one: len(places) for one, places in pure.packed(ids).items()} == {
        Modality.TEXT: 128,
        Modality.IMAGE: 128,
    }
    assert torch.equal(mixed.packed(ids)[Modality.TEXT], torch.arange(256))
    [layer] = states(2, ids)
    as_text = pure.restored(layer, torch.zeros_like(ids))
    assert torch.equal(mixed.restored(layer, ids).keys, as_text.keys)
    assert not torch.equal(pure.restored(layer, ids).keys, as_text.keys)


def test_memory_is_the_report_of_a_cache_of_one_row() -> None:
    layers = states(3, layers=2)
    report = Paged("x", KVPolicy.preset("channel")).memory(layers, IDS)
    assert report.tokens == {"text": 190, "image": 300, "video": 0, "audio": 0}
    assert report.values == 2 * 2 * KV_HEADS * HEAD_DIM * len(IDS)


def test_methods_say_what_they_cannot_do() -> None:
    by_name = {method.name: method for method in METHODS}
    layers = states(1)
    assert "no such tokens" in by_name["channel, audio in 16 bit"].missing(layers, IDS)
    assert by_name["channel, image in 16 bit"].missing(layers, IDS) is None
    assert by_name["16 bit"].missing(layers, IDS) is None
    assert len(by_name) == len(METHODS)


@pytest.mark.daily(
    "None-1-standard",
    "200-200-standard:center=false",
    "40-1-standard",
    "110-20-standard:center=false",
)
@pytest.mark.parametrize("policy", ["standard", "standard:center=false"])
@pytest.mark.parametrize(("first", "step"), [(None, 1), (200, 200), (40, 1), (110, 20)])
def test_restored_is_what_an_engine_stores(first: int | None, step: int, policy: str) -> None:
    """Token for token, though ``Blocks`` takes many steps at once."""
    layer, tokens = Layer(policy), 390
    request = layer.request(tokens)
    layer.step([(request, first or tokens)])
    while request.read < tokens:
        layer.step([(request, min(step, tokens - request.read))])
    queries, keys, values = (x.transpose(0, 1)[None] for x in request.states)
    recorded = LayerStates(
        index=0,
        module=torch.nn.Module(),
        scaling=1.0,
        keys=keys,
        values=values,
        first_queries=queries,
        sigmas=dict.fromkeys((True, False), layer.attention.sigma),
    )
    method = Blocks("x", KVPolicy.preset(policy, window=0, sinks=0), first=first, step=step)
    back = method.restored(recorded, torch.zeros(tokens, dtype=torch.int8))
    stored = layer.stored(request, tokens)
    for found, expected in zip((back.keys, back.values), stored, strict=True):
        torch.testing.assert_close(found[0].transpose(0, 1), expected)


@pytest.mark.parametrize("method", block_methods(), ids=lambda method: method.name)
def test_rows_do_not_know_of_each_other(method: Blocks) -> None:
    ids = torch.zeros(300, dtype=torch.int8)
    [both] = states(2, ids)
    back = method.restored(both, ids)
    wanted, window = torch.zeros(300, dtype=torch.bool), method.policy.window
    assert window or not method.policy.sinks
    if window:
        wanted[:4] = wanted[-window:] = True
    assert ((back.keys == both.keys).all(-1) == wanted).all()
    assert method.memory([both], ids) is None
    alone = LayerStates(**vars(both) | {"keys": both.keys[1:], "values": both.values[1:]})
    found = method.restored(alone, ids)
    assert torch.equal(found.keys, back.keys[1:]) and torch.equal(found.values, back.values[1:])
