"""Attention over blocks: every schedule gives what attention's definition gives."""

import pytest
import torch

from oscar_mm import KVPolicy
from oscar_mm.errors import InputError
from oscar_mm.vllm_plugin import Settings, servable
from tests.vllm_plugin.requests import Layer, Request

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
POLICIES = ["standard", "standard:bits=4/2", "standard:bits=2", "quarot"]


@pytest.fixture(params=DEVICES)
def place(request: pytest.FixtureRequest) -> dict:
    """Arguments of a layer."""
    if request.param == "cpu":
        return {"device": "cpu", "dtype": torch.float32}
    return {"device": "cuda:0", "dtype": torch.bfloat16}


def check(layer: Layer, request: Request, start: int, stop: int) -> None:
    found = request.outputs[-1].cpu().double()
    expected = layer.expected(request, start, stop)
    assert not found.isnan().any()
    bound = 1e-4 if layer.dtype == torch.float32 else 0.02
    assert float((found - expected).norm() / expected.norm()) < bound


@pytest.mark.daily("cpu-standard", "cpu-quarot")
@pytest.mark.parametrize("policy", POLICIES)
def test_any_schedule(policy: str, place: dict) -> None:
    """Prompts alone, together and in chunks, beside requests that decode, then all decode."""
    layer = Layer(policy, **place)
    first, second, third = layer.request(400), layer.request(700), layer.request(300)
    plan = [
        [(first, 137)],
        [(first, 1), (second, 300)],
        [(first, 1), (second, 129), (third, 40)],
        [(first, 1), (third, 1), (second, 31)],
        *[[(second, 1), (third, 1), (first, 1)]] * 100,
    ]
    for number, scheduled in enumerate(plan):
        before = [request.read for request, _ in scheduled]
        layer.step(scheduled, padding=number % 3 if all(n == 1 for _, n in scheduled) else 0)
        if number < 6 or number % 9 == 0:
            for (request, n), start in zip(scheduled, before, strict=True):
                check(layer, request, start, start + n)
    for request in (first, second, third):
        keys, values = layer.stored(request, request.read)
        for stored, came in zip((keys, values), request.states[1:], strict=True):
            came = came[: request.read].cpu().float()
            errors = (stored - came).norm(dim=(1, 2)) / came.norm(dim=(1, 2))
            assert errors.max() < {4: 0.2, 3: 0.4, 2: 0.75}[layer.format.bits.values + 0]


@pytest.mark.parametrize("tokens", [1, 4, 7])
def test_heads_of_256_channels(tokens: int, place: dict) -> None:
    """Qwen3.5 has such heads. A request has several new tokens if it has drafts."""
    layer = Layer(**place, head_dim=256, query_tokens=tokens, pages=16)
    first, second = layer.request(400), layer.request(300)
    plan = [[(first, 137)], [(first, tokens), (second, 260)], [(second, 3), (first, 129)]]
    plan += [[(second, tokens), (first, tokens)]] * 4
    for scheduled in plan:
        before = [request.read for request, _ in scheduled]
        layer.step(scheduled, decodes=sum(n == tokens for _, n in scheduled))
        for (request, n), start in zip(scheduled, before, strict=True):
            check(layer, request, start, start + n)


@pytest.mark.daily("cpu-0-1", "cpu-2-5")
@pytest.mark.parametrize(("further", "tokens"), [(0, 1), (1, 1), (2, 1), (2, 5)])
def test_the_last_layer_stores_for_all(further: int, tokens: int, place: dict) -> None:
    """Once a forward pass has gone through all layers of the tables; else each stores its own."""
    layer = Layer(**place, query_tokens=tokens, layers_of_tables=3)
    layer.other_pages = [layer.pages.clone() for _ in range(further)]
    alone = Layer(**place, query_tokens=tokens, layers_of_tables=2)
    pairs = [(one.request(500), one.request(500)) for one in (layer, alone)]
    for number in range(26):
        steps = []
        for one, (first, second) in zip((layer, alone), pairs, strict=True):
            if not number:
                one.step([(first, 120), (second, 250)])
            before = first.read, second.read
            steps.append(one.step([(first, tokens), (second, tokens)], decodes=2))
            for request, start in zip((first, second), before, strict=True):
                check(one, request, start, start + tokens)
        assert [step.tables.staged for step in steps] == [further == 2, False]
        for pages in (*layer.other_pages, alone.pages):
            assert torch.equal(layer.pages, pages)


def test_steps_after_an_interrupted_pass_are_as_before(place: dict) -> None:
    """Captured graphs, which store in the last layer, go on."""
    layer = Layer(**place, layers_of_tables=3)
    further = layer.other_pages = [layer.pages.clone() for _ in range(2)]
    first, second = layer.request(200), layer.request(200)
    layer.step([(first, 120)])
    assert layer.step([(first, 1)]).tables.staged
    layer.other_pages = further[:1]
    layer.step([(second, 100)])
    layer.other_pages = further
    for _ in range(20):
        assert layer.step([(first, 1)]).tables.staged
        check(layer, first, first.read - 1, first.read)
    for pages in further:
        assert torch.equal(pages[first.blocks], layer.pages[first.blocks])


def test_a_first_pass_that_is_captured_stores_layer_by_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its graph would find the tables of another kind of step."""
    layer = Layer()
    request = layer.request(200)
    layer.step([(request, 100)])
    fresh = Layer()
    again = fresh.request(200)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    fresh.step([(again, 100)])
    monkeypatch.undo()
    assert layer.step([(request, 1)]).tables.staged
    for _ in range(3):
        assert not fresh.step([(again, 1)]).tables.staged
        check(fresh, again, again.read - 1, again.read)


def test_several_new_tokens_at_once(place: dict) -> None:
    """As speculative decoding asks, also where a page begins among them."""
    layer = Layer(query_tokens=5, **place)
    first, second = layer.request(200), layer.request(200)
    layer.step([(first, 120), (second, 20)], decodes=0)
    for _ in range(4):
        before = first.read, second.read
        layer.step([(first, 5), (second, 5)], decodes=2)
        for request, start in zip((first, second), before, strict=True):
            check(layer, request, start, start + 5)
    # Of the last five tokens three are taken back; others come in their place.
    first.read, second.read = first.read - 3, second.read - 3
    layer.step([(first, 5), (second, 5)], decodes=2)
    check(layer, first, first.read - 5, first.read)


def test_known_beginnings(place: dict) -> None:
    """A request that shares another's blocks attends to them, and writes to none of them."""
    layer = Layer(**place)
    first = layer.request(400)
    layer.step([(first, 400)])
    before = layer.pages[first.blocks].clone()
    second = layer.request(500, like=first, shared=256)
    third = layer.request(257, like=first, shared=256)
    layer.step([(third, 1), (second, 200)])
    check(layer, third, 256, 257)
    check(layer, second, 256, 456)
    assert torch.equal(layer.pages[first.blocks], before)
    assert second.blocks[:2] == first.blocks[:2] and second.blocks[2] != first.blocks[2]


def test_pieces_of_a_prompt_are_stored_the_same() -> None:
    """In pieces that end where pages end: the same bytes. Cut elsewhere: the same values, and keys
    about as exact."""
    whole, pieces, odd = (Layer() for _ in range(3))
    requests = [layer.request(600) for layer in (whole, pieces, odd)]
    whole.step([(requests[0], 600)])
    for count in (256, 128, 216):
        pieces.step([(requests[1], count)])
    for count in (100, 60, 7, 1, 332, 100):
        odd.step([(requests[2], count)])
    assert torch.equal(whole.pages, pieces.pages)
    keys, values = whole.stored(requests[0], 600)
    odd_keys, odd_values = odd.stored(requests[2], 600)
    assert torch.equal(values, odd_values)
    right = requests[0].states[1]
    error, odd_error = ((x - right).norm() / right.norm() for x in (keys, odd_keys))
    assert odd_error < 1.1 * error


def test_centers_follow_the_keys_of_a_long_answer() -> None:
    """After a short prompt keys are stored about as exactly as in one step, though they drift."""
    layers = once, decoding = Layer(), Layer()
    requests = [layer.request(600) for layer in layers]
    for request in requests:
        request.states[1][60:] += 4 * request.states[1][0]
    once.step([(requests[0], 600)])
    # Only where a page begins does it matter that tokens come one by one.
    for count in (40, 88, *[1, 127] * 3, 1, 87):
        decoding.step([(requests[1], count)])
    came = requests[0].states[1][256:]
    error, other = (
        float((layer.stored(request, 600)[0][256:] - came).norm())
        for layer, request in zip(layers, requests, strict=True)
    )
    assert other < 1.1 * error < 0.3 * came.norm()


def test_small_workspace() -> None:
    """Requests with a past are read some at a time."""
    one, few = Layer(), Layer(max_unpacked=3)
    for layer in (one, few):
        requests = [layer.request(300) for _ in range(3)]
        layer.step([(request, 130) for request in requests])
        step = layer.step([(request, 100) for request in requests])
        assert len(step.readings) == (1 if layer is one else 3)
        for request in requests:
            check(layer, request, 130, 230)


def test_what_has_no_slot_is_not_stored() -> None:
    """As in runs that warm up."""
    layer = Layer()
    request = layer.request(100)
    request.blocks = [-1]
    layer.step([(request, 100)])
    assert (layer.pages == 255).all()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"policy": "channel"}, "key_axis='token'"),
        ({"policy": "standard:bits=16"}, "the same for all modalities"),
        ({"policy": "standard:window=129"}, "window must be at most 128"),
        ({"policy": "compact:sinks=65"}, "sinks must be at most 64"),
        ({"policy": "standart"}, "did you mean"),
        ({"polcy": "standard"}, "no option polcy"),
        ("standard", "must be a mapping"),
    ],
)
def test_settings_that_cannot_be(config: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Settings.of({"oscar_mm": config})


def test_bits_by_modality_are_refused() -> None:
    policy = KVPolicy.preset("standard", bits={"image": 2})
    with pytest.raises(InputError, match="the same for all modalities"):
        servable(policy)


@pytest.mark.parametrize(("policy", "size"), [("standard", 90), ("standard:bits=2", 74)])
def test_bytes_of_a_token(policy: str, size: int) -> None:
    assert Settings(servable(policy)).token_bytes(8, 128) == size
