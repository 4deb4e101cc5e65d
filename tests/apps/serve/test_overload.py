"""A greedy client and a modest one at a server with few slots."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from oscar_mm import OscarOmniPipeline
from oscar_mm.apps.serve.fair_queue import Share
from tests.apps.serve.conftest import served, started, user
from tests.apps.serve.test_server import ask, client_of, metrics
from tests.apps.serve.test_service import asking, eventually, one_running
from tests.pipelines.conftest import NEVER

PROXY = ("127.0.0.1",)
GREEDY, MODEST = "192.0.2.1", "192.0.2.2"


def client_at(address: str, host: str) -> openai.OpenAI:
    """A client with an address of its own, as a proxy reports it."""
    return client_of(address).with_options(default_headers={"X-Forwarded-For": f"x, {host}"})


@contextmanager
def crowd(address: str, count: int) -> Iterator[list[float]]:
    """A client that has so many requests all the time; a list with an entry for each answer."""
    ended, over = list[float](), threading.Event()

    def work(number: int) -> None:
        client = client_at(address, GREEDY)
        while not over.is_set():
            ask(client, user("Why?"), user=f"{number}, {len(ended)}", max_tokens=20)
            ended.append(number)

    threads = [threading.Thread(target=work, args=[number]) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield ended
    finally:
        over.set()
        for thread in threads:
            thread.join(60)


@contextmanager
def held_prompts(pipe: Any) -> Iterator[threading.Event]:
    """Let no prompt pass the first layer within the block; an event that tells of one."""
    begun, over = threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        begun.set()
        over.wait(20)

    hook = pipe.model.get_decoder().layers[0].register_forward_pre_hook(hold)
    try:
        yield begun
    finally:
        hook.remove()
        over.set()


def answers_during(address: str, ended: list[float], requests: int) -> list[int]:
    """Return how many answers the crowd gets during each request of the modest client."""
    client, counts = client_at(address, MODEST), []
    for _ in range(requests):
        before = len(ended)
        ask(client, user("Why?"))
        counts.append(len(ended) - before)
    return counts


def test_a_modest_client_does_not_wait_for_all_requests_of_a_greedy_one(omni) -> None:
    """First come, first served, it would wait for the 14 that wait. The greedy one names another
    user in each request."""
    with (
        served(omni, running=2, trusted_proxies=PROXY) as address,
        crowd(address, 16) as ended,
    ):
        eventually(lambda: metrics(address, None)["oscar_mm_waiting"] == 14)
        eventually(lambda: len(ended) > 4)
        counts = answers_during(address, ended, 5)
        found = metrics(address, None)
    # Usually two: until a slot is free, and in the other slot meanwhile.
    assert sum(counts) <= 5 * 6, counts
    assert found["oscar_mm_queue_seconds_count"] > found["oscar_mm_waiting_clients"] > 1


@pytest.mark.slow
def test_nor_where_only_memory_is_short(qwen3_omni_folder) -> None:
    pipe = OscarOmniPipeline(
        qwen3_omni_folder, policy="bf16", device="cpu", kv_budget="10MB", prefix_cache=None
    )
    pipe.model.generation_config.eos_token_id = NEVER
    assert pipe.budget is not None
    with served(pipe, trusted_proxies=PROXY, conversations=1) as address:
        ask(client_at(address, MODEST), user("Why?"), max_tokens=40)
        pipe.budget.limit = 3 * pipe.budget.taken_bytes
        with crowd(address, 16) as ended:
            eventually(lambda: metrics(address, None)["oscar_mm_prompts_waiting"] > 8)
            counts = answers_during(address, ended, 5)
            assert metrics(address, None)["oscar_mm_waiting"] == 0
    assert sum(counts) <= 5 * 6, counts


def test_addresses_are_those_of_connections(omni) -> None:
    """Unless the proxy is trusted, its header says nothing."""
    with (
        served(omni, running=1, waiting=1, max_new_tokens=4000) as address,
        one_running(address),
        asking(address),
    ):
        eventually(lambda: metrics(address, None)["oscar_mm_waiting"] == 1)
        assert metrics(address, None)["oscar_mm_waiting_clients"] == 1
        with pytest.raises(openai.RateLimitError):
            ask(client_at(address, MODEST), user("Why?"))
        assert metrics(address, None)['oscar_mm_refusals_total{reason="full"}'] == 1


def test_requests_do_not_wait_for_ever(omni) -> None:
    with served(omni, running=1, queue_s=0.3, max_new_tokens=4000) as address:
        with one_running(address):
            with pytest.raises(openai.RateLimitError) as refused:
                ask(client_of(address), user("Why?"))
            assert refused.value.response.headers["retry-after"] == "5"
            assert metrics(address, None)['oscar_mm_refusals_total{reason="timeout"}'] == 1
        eventually(lambda: metrics(address, None)["oscar_mm_running"] == 0)
        assert ask(client_of(address), user("Why?")).choices


def test_users_are_named_in_each_api(omni) -> None:
    from oscar_mm.apps.serve.server import create_app
    from oscar_mm.apps.serve.service import ServerLimits

    app = create_app(omni, "tiny", ServerLimits(trusted_proxies=PROXY))
    with started(app) as (_, address), client_at(address, MODEST) as client:
        ask(client, user("Why?"), user="a")
        ask(client, user("Why?"), user="a", extra_body={"safety_identifier": "b"})
        client.completions.create(model="tiny", prompt="Why?", max_tokens=2, user="c")
        client.responses.create(model="tiny", input="Why?", max_output_tokens=2, user="d")
        body = {"messages": [user("Why?")], "max_tokens": 2, "metadata": {"user_id": "e"}}
        client.post("/messages", body=body, cast_to=object)
        ask(client, user("Why?"))
        found = app.state.service.queue._queue._all.parts[MODEST].parts
    assert [*found] == ["a", "b", "c", "d", "e", ""]


def test_what_answers_cost(qwen3_omni_folder) -> None:
    """What was computed, also of an answer that is left or that fails."""
    from oscar_mm.apps.serve.server import create_app
    from oscar_mm.apps.serve.service import ServerLimits

    pipe = OscarOmniPipeline(qwen3_omni_folder, policy="compact", device="cpu", prefix_cache="1MB")
    pipe.model.generation_config.eos_token_id = NEVER
    app = create_app(pipe, "tiny", ServerLimits(max_new_tokens=4000, running=4))

    total = 0.0

    def cost() -> float:
        """Return what was added since the last call."""
        nonlocal total
        share: Share = app.state.service.queue._queue._all
        eventually(lambda: not share.slots)
        before, total = total, share.settled
        return total - before

    with started(app) as (_, address), client_of(address) as client:
        long = user("What is written on the sign at the corner? " * 20)
        first = ask(client, long).usage
        assert cost() == first.prompt_tokens + 2 * 6
        again = ask(client, long).usage
        cached = again.prompt_tokens_details.cached_tokens
        assert cached > 100 and cost() <= first.prompt_tokens - cached + 2 * 6
        twice = ask(client, user("Why?"), n=2).usage
        assert twice.prompt_tokens < cost() - 2 * 12 <= 2 * twice.prompt_tokens
        past = [long, {"role": "assistant", "content": "A dog."}, user("Why?")]
        with asking(address, messages=past, stream=True, max_tokens=4000) as left:
            left.getresponse().readline()
        assert cost() > first.prompt_tokens - cached, "earlier turns count"
        with held_prompts(pipe) as begun:
            with asking(address, messages=[user("Which month was the wettest? " * 60)]):
                assert begun.wait(20)
            eventually(lambda: bool(app.state.service.queue.closing))
        assert cost() > 3 * first.prompt_tokens / 2, "of one that leaves as its prompt is read"
        with pytest.raises(openai.BadRequestError):
            ask(client, user("Why?"), extra_body={"guided_regex": "("})
        assert cost() > 0, "of a request that fails in its slot"
