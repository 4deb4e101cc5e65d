"""Rings in attention: the window of a request and its sinks are read as they came.

The truth is attention's definition in float64, over what pages have and, of those tokens, over what
came.
"""

from dataclasses import replace

import pytest
import torch

from oscar_mm.ops.rings import RingShape
from oscar_mm.vllm_plugin.step import Rings
from tests.vllm_plugin.requests import Layer, Request
from tests.vllm_plugin.test_attention import check, place

__all__ = ["place"]


def policy(window: int, sinks: int = 4) -> str:
    return f"standard:window={window},sinks={sinks}"


def step(layer: Layer, *scheduled: tuple[Request, int], decodes: int | None = None) -> None:
    """A step, all outputs of which are checked."""
    before = [request.read for request, _ in scheduled]
    layer.step([*scheduled], decodes)
    for (request, n), start in zip(scheduled, before, strict=True):
        check(layer, request, start, start + n)


def is_exact(layer: Layer, request: Request) -> bool:
    """Whether pages alone would give something else: that a check can tell one from the other."""
    last = request.read - 1
    found = layer.expected(request, last, last + 1)
    layer.policy, own = replace(layer.policy, window=0, sinks=0), layer.policy
    packed = layer.expected(request, last, last + 1)
    layer.policy = own
    return float((found - packed).norm() / packed.norm()) > 0.01


@pytest.mark.daily("cpu-0-4", "cpu-128-64")
@pytest.mark.parametrize(("window", "sinks"), [(0, 0), (0, 4), (32, 4), (64, 0), (128, 64)])
def test_decoding_after_prompts(window: int, sinks: int, place: dict) -> None:
    """Requests of several lengths, in rows that move, decode past the ends of blocks."""
    layer = Layer(policy(window, sinks), **place)
    short, middle, long = layer.request(160), layer.request(300), layer.request(600)
    step(layer, (middle, 3), (long, 333))
    step(layer, (short, 1), (middle, 117))
    for number in range(150):
        rows = [(short, 1), (middle, 1), (long, 1)]
        turned = rows[number % 3 :] + rows[: number % 3]
        if number % 10 == 0:
            step(layer, *turned)
            assert is_exact(layer, long) is (window + sinks > 0)
        else:
            layer.step(turned)


def test_a_prompt_in_chunks(place: dict) -> None:
    layer = Layer(**place)
    request, other = layer.request(500), layer.request(300)
    for count in (200, 40, 2, 5, 128):
        step(layer, (other, 1), (request, count), decodes=1)
    for _ in range(5):
        step(layer, (request, 1), (other, 1))
        assert is_exact(layer, request)


def test_a_beginning_that_is_shared(place: dict) -> None:
    """Its ring has what was computed since; the first tokens are another's."""
    layer = Layer(**place)
    first = layer.request(400)
    step(layer, (first, 300))
    second = layer.request(500, like=first, shared=256)
    step(layer, (first, 1), (second, 1))
    for _ in range(40):
        step(layer, (first, 1), (second, 1))
    assert is_exact(layer, second)


def test_a_beginning_that_ends_where_another_request_is(place: dict) -> None:
    """One of both continues the ring, which has the same tokens up to there."""
    layer = Layer(**place)
    first = layer.request(400)
    step(layer, (first, 256))
    second = layer.request(400, like=first, shared=256)
    second.exact_from, first.exact_from = 0, 256
    for _ in range(20):
        step(layer, (second, 1), (first, 1))


def test_preemption(place: dict) -> None:
    """A request loses its blocks, gets others, and computes its tokens anew."""
    layer = Layer(policy(64), **place)
    request, other = layer.request(300), layer.request(300)
    step(layer, (request, 150), (other, 140))
    for _ in range(10):
        step(layer, (request, 1), (other, 1))
    # Another gets its blocks at once, and fills them with its own.
    taken = layer.request(300)
    request.blocks, taken.blocks = taken.blocks, request.blocks
    request.read = 0
    step(layer, (other, 1), (taken, 150), (request, 160))
    for _ in range(10):
        step(layer, (taken, 1), (request, 1), (other, 1))
    assert is_exact(layer, request) and is_exact(layer, taken)


@pytest.mark.parametrize("window", [32, 128])
def test_drafts_that_are_rejected(window: int, place: dict) -> None:
    """Other tokens come in their place, also where a block begins among them."""
    layer = Layer(policy(window), **place, query_tokens=5)
    first, second = layer.request(500), layer.request(500)
    step(layer, (first, 120), (second, 133))
    for number in range(30):
        step(layer, (second, 5), (first, 5), decodes=2)
        for request, rejected in ((first, number % 5), (second, 4 - number % 5)):
            request.read -= rejected
            for states in request.states:
                states[request.read :] *= -1
    step(layer, (second, 5), (first, 5), decodes=2)
    assert is_exact(layer, first)


def test_the_last_layer_stores_from_rings(place: dict) -> None:
    """The same pages as where each layer stores its own."""
    layer, alone = Layer(**place, layers_of_tables=3), Layer(**place)
    layer.other_pages = [layer.pages.clone() for _ in range(2)]
    requests = [one.request(300) for one in (layer, alone)]
    for one, request in zip((layer, alone), requests, strict=True):
        one.tables._goes_through_all = None if one is layer else False
        step(one, (request, 100))
    for _ in range(40):
        for one, request in zip((layer, alone), requests, strict=True):
            step(one, (request, 1))
    for pages in layer.other_pages:
        assert (pages == layer.pages).all() and (pages == alone.pages).all()


@pytest.mark.parametrize("window", [0, 32])
def test_micro_batches_have_rings_of_their_own(window: int) -> None:
    """Each has a builder of tables, and attends before the other has stored its tokens."""
    rings = Rings(4, RingShape(0, window, 1), 8, torch.device("cpu"))
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    for length in range(1, 5):
        found = []
        for blocks in ([1, 2], [3, 4]):
            tails = torch.zeros(2, 2, dtype=torch.int32)
            blocks = torch.tensor(blocks, dtype=torch.int32)[:, None]
            slots = blocks[:, 0].long() * 128 + length - 1
            rings.find(blocks, torch.full_like(starts[:2], length), starts, slots, tails)
            found += tails[:, 0].tolist()
        assert sorted(found) == [0, 1, 2, 3]


def test_more_requests_than_rings_have_waited(place: dict) -> None:
    """Those that come back read pages, and fill a ring again."""
    layer = Layer(**place, rings=2)
    first, second, third = (layer.request(200) for _ in range(3))
    step(layer, (first, 100), (second, 120))
    step(layer, (second, 1))
    step(layer, (third, 110))
    first.exact_from = 100
    for _ in range(8):
        step(layer, (first, 1), (third, 1))
