"""Several answers to one request: each as if it was asked for alone, the prompt read once."""

import threading
from collections import defaultdict
from typing import Any

import openai
import pytest

from oscar_mm import OscarOmniPipeline
from oscar_mm.pages.layout import PAGE_TOKENS
from tests.apps.serve.conftest import image, png, served, text, user
from tests.apps.serve.test_server import ask, client_of, metrics
from tests.apps.serve.test_service import asking, eventually
from tests.pipelines.conftest import NEVER

LONG = user("What is written on the sign at the corner? " * 20)


def said(client: Any, *messages: dict[str, Any], **options: Any) -> list[str]:
    answer = ask(client, *messages, **options)
    assert [choice.index for choice in answer.choices] == [*range(len(answer.choices))]
    return [choice.message.content for choice in answer.choices]


def test_choices_are_those_of_the_next_seeds(client) -> None:
    question, options = user(image(png()), text("What is it?")), {"temperature": 1.2}
    alone = [ask(client, question, seed=seed, **options) for seed in (7, 8, 9)]
    expected = [one.choices[0].message.content for one in alone]
    assert len(set(expected)) == 3
    whole = ask(client, question, seed=7, n=3, **options)
    assert [one.message.content for one in whole.choices] == expected
    assert whole.usage.prompt_tokens == alone[0].usage.prompt_tokens
    assert whole.usage.completion_tokens == 18
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 18
    # Each of them can be continued.
    for words in expected:
        past = [question, {"role": "assistant", "content": words}, user("Why?")]
        assert ask(client, *past).choices


@pytest.mark.parametrize("logprobs", [False, True])
def test_streamed(client, logprobs: bool) -> None:
    options = {"seed": 7, "n": 3, "temperature": 1.2, "logprobs": logprobs, "max_tokens": 12}
    whole = ask(client, user("Why?"), **options)
    parts = ask(
        client, user("Why?"), stream=True, stream_options={"include_usage": True}, **options
    )
    words, reasons, found = defaultdict(str), {}, defaultdict(list)
    *chunks, last = parts
    for [choice] in (chunk.choices for chunk in chunks):
        assert choice.index not in reasons, "nothing comes after the reason"
        words[choice.index] += choice.delta.content or ""
        if choice.logprobs:
            found[choice.index] += choice.logprobs.content
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert last.usage == whole.usage and last.choices == []
    for choice in whole.choices:
        assert words[choice.index] == choice.message.content
        assert reasons[choice.index] == choice.finish_reason == "length"
        expected = choice.logprobs.content if logprobs else []
        assert [one.token for one in found[choice.index]] == [one.token for one in expected]
        assert len(expected) == 12 * logprobs


def test_the_prompt_is_read_once(qwen3_omni_folder) -> None:
    pipe = OscarOmniPipeline(
        qwen3_omni_folder, policy="compact", device="cpu", prefix_cache=4 << 20
    )
    pipe.model.generation_config.eos_token_id = NEVER
    read: list[int] = []
    hook = (
        pipe.model.get_decoder()
        .layers[0]
        .register_forward_pre_hook(lambda _, args: read.append(args[0].shape[1]))
    )
    with served(pipe) as address, client_of(address) as client:
        [words] = said(client, LONG, temperature=0)
        assert max(read) > 2 * PAGE_TOKENS
        other = user("Which month was the wettest of the year? " * 20)
        read.clear()
        said(client, other, n=4, temperature=0)
        # The others read what comes after the last whole page, each for itself or in one pass.
        prompts = sorted(tokens for tokens in read if tokens > 1)
        assert prompts[-1] > PAGE_TOKENS and sum(prompts[:-1]) <= 3 * PAGE_TOKENS
        # A later turn is read from the chat that is kept, once for each of them.
        read.clear()
        past = [LONG, {"role": "assistant", "content": words}, user("Why?")]
        assert len(set(said(client, *past, n=3, temperature=0))) == 1
        assert max(read) < PAGE_TOKENS
    hook.remove()


def test_numbers_that_are_refused(omni) -> None:
    with served(omni, running=2) as address, client_of(address) as client:
        assert len(said(client, user("Why?"), n=2)) == 2
        for count, expected in (
            (3, "at most 2 on this server"),
            (17, "at most 16"),
            (0, "least 1"),
        ):
            with pytest.raises(openai.BadRequestError, match=expected) as refused:
                ask(client, user("Why?"), n=count)
            assert refused.value.param == "n"


def test_requests_that_need_more_places_than_are_left(omni) -> None:
    """Each needs most of them; none waits for another's for ever."""
    with served(omni, running=4) as address:
        found: list[int] = []

        def work() -> None:
            found.append(len(said(client_of(address), user("Why?"), n=3)))

        threads = [threading.Thread(target=work) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert found == [3] * 5
        assert metrics(address, None)["oscar_mm_running"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_ends_all_of_them(omni, stream: bool) -> None:
    before = omni.store.memory().used_bytes
    with served(omni, running=4, waiting=1, max_new_tokens=4000, conversations=1) as address:
        with asking(address, n=3, max_tokens=4000, stream=stream) as first:
            if stream:
                first.getresponse().readline()
            eventually(lambda: metrics(address, None)["oscar_mm_decoding"] == 3)
            # One that waits for places gives back those that it has.
            with asking(address, n=2):
                eventually(lambda: metrics(address, None)["oscar_mm_waiting"] == 1)
            eventually(lambda: metrics(address, None)["oscar_mm_waiting"] == 0)
        eventually(lambda: metrics(address, None)["oscar_mm_running"] == 0)
        assert len(said(client_of(address), user("Why?"), n=4)) == 4
    assert omni.store.memory().used_bytes == before
