"""The queue, the memory, the end: what one client does is not felt by the others."""

import asyncio
import http.client
import io
import itertools
import json
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import openai
import pytest
from PIL import Image
from starlette.responses import StreamingResponse

from oscar_mm import OscarOmniPipeline
from oscar_mm.chat.chat import Chat
from oscar_mm.engine.detokenizer import Detokenizer
from oscar_mm.engine.request import Request
from tests.apps.serve.conftest import image, png, served, started, text, user
from tests.apps.serve.test_server import ask, client_of, metrics
from tests.pipelines.conftest import NEVER
from tests.prompts import noise
from tests.waits import until


def together(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What comes of so many calls at once, each in a thread; an error where it raised one."""
    found: list[Any] = [None] * count

    def call(index: int) -> None:
        try:
            found[index] = work(index)
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=call, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def eventually(check: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def asking(
    address: str, headers: dict[str, str] | None = None, **body: Any
) -> Iterator[http.client.HTTPConnection]:
    """A connection over which a request was sent."""
    request = {"messages": [user("Why?")], "max_tokens": 6} | body
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=30)
    headers = {"Content-Type": "application/json"} | (headers or {})
    connection.request("POST", "/v1/chat/completions", json.dumps(request), headers)
    try:
        yield connection
    finally:
        connection.close()


@contextmanager
def one_running(address: str) -> Iterator[Any]:
    """A long answer that has begun."""
    with ask(client_of(address), user("Why?"), stream=True, max_tokens=2000) as stream:
        next(iter(stream))
        yield stream


@pytest.mark.daily("64")
@pytest.mark.parametrize("conversations", [1, 64])
def test_the_same_request_of_several_clients(omni, conversations) -> None:
    shown = user(image(png()), text("What?"))
    before = omni.store.memory().used_bytes
    with served(omni, running=4, conversations=conversations) as address:
        past = [shown, {"role": "assistant", "content": "A dog."}, user("And?")]

        def work(_: int) -> tuple:
            client = client_of(address)
            answers = [ask(client, shown), ask(client, *past), ask(client, shown)]
            return tuple((x.choices[0].message.content, x.usage.prompt_tokens) for x in answers)

        found = together(8, work)
        assert len(set(found)) == 1, found
        assert metrics(address, None)["oscar_mm_conversations"] <= conversations
    assert omni.store.memory().used_bytes == before


def test_a_client_that_leaves_the_queue_frees_its_place(omni) -> None:
    with served(omni, running=1, waiting=1, max_new_tokens=2000) as address:
        with one_running(address):
            for _ in range(3):
                with asking(address):
                    eventually(lambda: metrics(address, None)["oscar_mm_waiting"] == 1)
                eventually(lambda: metrics(address, None)["oscar_mm_waiting"] == 0)
            assert metrics(address, None)["oscar_mm_running"] == 1
        assert ask(client_of(address), user("Why?")).choices


def test_a_client_that_leaves_before_the_first_piece_frees_its_place(omni, monkeypatch) -> None:
    """Also in the queue of the engine, while another answer goes on."""
    monkeypatch.setattr(omni.engine.scheduler, "max_rows", 1)
    with served(omni, max_new_tokens=4000) as address:
        with asking(address, stream=True, max_tokens=4000) as first:
            first.getresponse().readline()
            eventually(lambda: metrics(address, None)["oscar_mm_decoding"] == 1)
            for stream in (False, True):
                with asking(address, stream=stream):
                    eventually(lambda: metrics(address, None)["oscar_mm_prompts_waiting"] == 1)
                eventually(lambda: metrics(address, None)["oscar_mm_running"] == 1)
                assert metrics(address, None)["oscar_mm_prompts_waiting"] == 0
            assert metrics(address, None)["oscar_mm_decoding"] == 1
        assert ask(client_of(address), user("Why?")).choices


@pytest.mark.parametrize("reads", ["question", "earlier turn"])
def test_a_disconnect_during_prefill_ends_it(omni, monkeypatch, reads: str) -> None:
    messages = [user("What is on the sign? " * 30)]
    if reads == "earlier turn":
        messages += [{"role": "assistant", "content": "A dog."}, user("Why?")]
    begun, cancelled, passes = threading.Event(), threading.Event(), [0, 0]
    cancel, used = Chat.cancel, omni.store.memory().used_bytes

    def cancel_and_signal(chat: Chat) -> None:
        cancel(chat)
        cancelled.set()

    def first_layer(*_: Any) -> None:
        passes[0] += 1
        begun.set()
        cancelled.wait(20)

    def second_layer(*_: Any) -> None:
        passes[1] += 1

    monkeypatch.setattr(Chat, "cancel", cancel_and_signal)
    layers = omni.model.get_decoder().layers
    with served(omni, running=1) as address:
        hooks = [
            layer.register_forward_pre_hook(hook)
            for layer, hook in zip(layers, (first_layer, second_layer), strict=False)
        ]
        try:
            with asking(address, messages=messages):
                assert begun.wait(20)
            eventually(lambda: metrics(address, None)["oscar_mm_running"] == 0)
        finally:
            for hook in hooks:
                hook.remove()
        assert passes == [1, 0] and cancelled.is_set()
        assert omni.store.memory().used_bytes == used
        with omni.chat() as chat:
            if len(messages) > 1:
                chat.tell(messages[0]["content"], "A dog.")
            expected = chat.ask(messages[-1]["content"], max_new_tokens=6).text
        answer = ask(client_of(address), *messages, max_tokens=6)
        assert answer.choices[0].message.content == expected


def test_a_stream_that_nobody_reads_frees_its_place(omni) -> None:
    with served(omni, running=1, max_new_tokens=2000) as address:
        for _ in range(3):
            with asking(address, stream=True, max_tokens=2000):
                eventually(lambda: metrics(address, None)["oscar_mm_running"] == 1)
            eventually(lambda: metrics(address, None)["oscar_mm_running"] == 0)
        assert ask(client_of(address), user("Why?")).choices


def test_a_body_that_does_not_come(omni) -> None:
    with served(omni, body_s=0.3) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as slow:
            slow.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
            )
            answer = http.client.HTTPResponse(slow)
            answer.begin()
            assert answer.status == 408
            assert "within 0.3 s" in json.loads(answer.read())["error"]["message"]
        assert ask(client_of(address), user("Why?")).choices


def test_bodies_have_a_bound_together(omni) -> None:
    """The limit counts the bodies of waiting requests too; a client leaves half of it to others."""
    limits = {"max_request_bytes": 3000, "trusted_proxies": ("127.0.0.1",)}
    with served(omni, running=1, max_new_tokens=2000, **limits) as address:
        padding = {"metadata": {"x": "y" * 2500}}
        with one_running(address):
            waiting = [asking(address, **padding) for _ in range(4)]
            for one in waiting:
                one.__enter__()
            eventually(lambda: metrics(address, None)["oscar_mm_waiting"] == 4)
            with pytest.raises(openai.InternalServerError, match="too many large") as refused:
                ask(client_of(address), user("Why?"), extra_body=padding)
            assert refused.value.status_code == 503
            assert refused.value.response.headers["retry-after"]
            assert metrics(address, None)['oscar_mm_refusals_total{reason="bodies"}'] == 1
            elsewhere = {"X-Forwarded-For": "192.0.2.1"}
            waiting.append(asking(address, headers=elsewhere, **padding))
            waiting[-1].__enter__()
            eventually(lambda: metrics(address, None)["oscar_mm_waiting"] == 5)
            for one in waiting:
                one.__exit__(None, None, None)
        assert ask(client_of(address), user("Why?"), extra_body=padding).choices


def test_a_large_request_does_not_stop_the_others(omni) -> None:
    escapes = "data:image/png;base64," + "%41" * 8_000_000
    body = json.dumps({"messages": [user(image(b""), text("a"))]}).replace(
        "data:image/png;base64,", escapes
    )
    slowest, done = 0.0, threading.Event()
    with served(omni) as address:

        def send() -> None:
            request = urllib.request.Request(
                f"{address}/v1/chat/completions",
                body.encode(),
                {"Content-Type": "application/json"},
            )
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=60)
            assert refused.value.code == 400
            assert "messages[0].content[0]" in json.load(refused.value)["error"]["message"]
            done.set()

        sender = threading.Thread(target=send)
        sender.start()
        while sender.is_alive():
            start = time.monotonic()
            urllib.request.urlopen(f"{address}/health", timeout=30).read()
            slowest = max(slowest, time.monotonic() - start)
            time.sleep(0.01)
    assert done.is_set() and slowest < 1


def test_failures_are_json_too(omni, monkeypatch, capfd) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a secret")

    with served(omni) as address:
        monkeypatch.setattr(omni.family, "render", fail)
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as failed:
                ask(client_of(address), user("Why?"), stream=stream)
            assert failed.value.status_code == 500
            assert failed.value.response.headers["content-type"] == "application/json"
            assert failed.value.body["type"] == "server_error"
            assert "secret" not in str(failed.value)
        for path in ("/v1/nothing", "/v1/chat/completions"):
            with pytest.raises(urllib.error.HTTPError) as missing:
                urllib.request.urlopen(address + path)
            assert json.load(missing.value)["error"]["type"] == "invalid_request_error"
        # The place is freed after the refusal is sent.
        until(lambda: metrics(address, None)["oscar_mm_running"] == 0, 10)
    assert "RuntimeError: a secret" in capfd.readouterr().err


@pytest.mark.parametrize("stream", [True, False])
def test_an_error_of_the_tokenizer_ends_the_answer(omni, monkeypatch, stream: bool) -> None:
    push = Detokenizer.push

    def fail(self: Detokenizer, *tokens: int) -> str:
        if len(self.token_ids) >= 3:
            raise RuntimeError("no text")
        return push(self, *tokens)

    monkeypatch.setattr(Detokenizer, "push", fail)
    with served(omni) as address, pytest.raises(openai.APIError, match="failed to answer"):
        impatient = client_of(address).with_options(timeout=20)
        list(ask(impatient, user("Why?"), stream=stream, max_tokens=500))


def test_models(client) -> None:
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.models.retrieve("org/other")
    assert (
        unknown.value.body["message"]
        == "The model `org/other` does not exist: this server has `tiny`."
    )
    with pytest.raises(openai.NotFoundError) as unknown:
        ask(client, user("Why?"), model="other")
    error = unknown.value.body
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert error["message"] == "The model `other` does not exist: this server has `tiny`."
    assert ask(client, user("Why?"), model=openai.omit).choices


def test_web_pages_cannot_use_it(omni) -> None:
    body = json.dumps({"messages": [user("Why?")], "max_tokens": 2}).encode()
    form = {"Content-Type": "text/plain"}
    there = {"Content-Type": "application/json", "Host": "evil.example"}

    def status(address: str, headers: dict[str, str]) -> int:
        request = urllib.request.Request(f"{address}/v1/chat/completions", body, headers)
        try:
            return urllib.request.urlopen(request).status
        except urllib.error.HTTPError as refused:
            assert json.load(refused)["error"]["type"]
            return refused.code

    with served(omni) as address:
        assert (status(address, form), status(address, there)) == (415, 421)
    with served(omni, api_key="secret") as address:
        key = {"Authorization": "Bearer secret"}
        assert (status(address, there), status(address, there | key)) == (401, 200)


def tokens_read(pipe: Any) -> tuple[list[int], Any]:
    """What the model reads from now on, prompts only, and what ends that."""
    read: list[int] = []

    def look(_: Any, __: Any, arguments: dict) -> None:
        if arguments["input_ids"].shape[1] > 1:
            read.extend(arguments["input_ids"][0].tolist())

    return read, pipe.model.register_forward_pre_hook(look, with_kwargs=True)


def test_messages_are_written_by_the_template(omni, client) -> None:
    """Several of a user, a later system message, an answer that nobody asked for."""
    said = [
        {"role": "assistant", "content": [text("Hello, who is there?")]},
        user(text("I am Tom.")),
        user(text("What is it?")),
    ]
    messages = [{**said[1], "content": [text("I am Tom.")]}, {**said[2], "content": [text("Why?")]}]
    conversation = [said[0], *messages]
    read, hook = tokens_read(omni)
    try:
        for more in (
            [],
            [{"role": "assistant", "content": [text("So.")]}],
        ):
            read.clear()
            later = [{"role": "system", "content": [text("Now in French.")]}]
            question = {"role": "user", "content": [text("And now?")]}
            asked = [*conversation, *more, *later, question] if more else conversation
            answer = ask(client, *asked)
            rendered = omni.processor.apply_chat_template(
                asked, tokenize=False, add_generation_prompt=True
            )
            expected = omni.processor.tokenizer(rendered)["input_ids"]
            assert read == expected
            assert answer.usage.prompt_tokens == len(expected)
    finally:
        hook.remove()


def test_media_of_several_messages(omni, client) -> None:
    shown = [user(image(png(1)), text(None)), user(image(png(2)), text("What?"))]
    read, hook = tokens_read(omni)
    try:
        ask(client, *shown)
    finally:
        hook.remove()
    start = omni.processor.tokenizer.convert_tokens_to_ids("<|im_start|>")
    pictures = omni.processor.tokenizer.convert_tokens_to_ids(omni.processor.image_token)
    turns = "".join("s" if one == start else "i" for one in read if one in (start, pictures))
    first, second, _ = turns.removeprefix("s").split("s")
    assert len(first) == len(second) > 1
    assert ask(client, {"role": "user", "content": [image(png(3))]}).choices


@pytest.fixture(scope="module")
def tight(qwen3_omni_folder) -> OscarOmniPipeline:
    """With a bound that the tests set."""
    pipe = OscarOmniPipeline(qwen3_omni_folder, policy="compact", device="cpu", kv_budget="10MB")
    pipe.model.generation_config.eos_token_id = NEVER
    return pipe


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    """A question that takes memory by its picture."""
    file = io.BytesIO()
    Image.fromarray(noise(512, 512)).save(file, "jpeg")
    return user(image(file.getvalue()), text("What?"))


@contextmanager
def memory_taken(pipe: Any, shown: dict[str, Any], monkeypatch: Any) -> Iterator[Any]:
    """The budget has room for one and a half of such requests, and somebody's answer holds one.

    Yields:
        that answer.
    """
    url = shown["content"][0]["image_url"]["url"]
    with pipe.chat() as chat:
        whole = chat.ask("What?", images=[url], max_new_tokens=6).memory.kv_bytes
    monkeypatch.setattr(pipe.budget, "limit", int(1.5 * whole))
    with pipe.chat() as chat:
        running = chat.stream("What?", images=[url], max_new_tokens=6)
        next(running)
        yield running


def test_a_request_without_memory_waits(tight, shown, monkeypatch) -> None:
    with memory_taken(tight, shown, monkeypatch) as running, served(tight) as address:
        timer = threading.Timer(0.5, running.close)
        timer.start()
        start = time.monotonic()
        found = together(3, lambda _: ask(client_of(address), shown))
        assert [one.usage.completion_tokens for one in found] == [6, 6, 6]
        assert time.monotonic() - start > 0.4
        tight.budget.limit //= 3
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as never:
                ask(client_of(address), shown, stream=stream)
            assert never.value.code == "context_length_exceeded"


def test_a_request_long_without_memory_is_refused(tight, shown, monkeypatch) -> None:
    taken = memory_taken(tight, shown, monkeypatch)
    with taken as running, served(tight, memory_wait_s=0.2) as address:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as refused:
                ask(client_of(address), shown, stream=stream)
            assert refused.value.status_code == 503
            assert int(refused.value.response.headers["retry-after"]) > 0
            assert "other requests use the memory" in refused.value.message
        running.close()
        assert ask(client_of(address), shown).choices


def test_kept_chats_give_way_where_they_cannot_go_to_disk(tight, shown, monkeypatch) -> None:
    with memory_taken(tight, shown, monkeypatch):
        monkeypatch.setattr(tight.budget, "folder", None)
    with served(tight) as address:
        others = [{**shown, "content": [shown["content"][0], text(word)]} for word in "abc"]
        for other in others:
            assert ask(client_of(address), other).choices
        assert metrics(address, None)["oscar_mm_conversations"] == 1


@contextmanager
def stopping(pipe: Any, grace_s: float, tokens: int) -> Iterator[tuple[list[str], list[Any]]]:
    """A server that is stopped while a stream runs and another request waits.

    Yields:
        the lines of the stream, and what the one that waited got.
    """
    from oscar_mm.apps.serve.server import create_app
    from oscar_mm.apps.serve.service import ServerLimits

    lines: list[str] = []
    waited: list[Any] = []
    passes = itertools.count()
    app = create_app(pipe, "tiny", ServerLimits(running=1, grace_s=grace_s, max_new_tokens=5000))

    def wait(address: str) -> None:
        waited.extend(together(1, lambda _: ask(client_of(address), user("Why?"))))

    with ExitStack() as connections:
        with started(app) as (server, address):

            def hold(*_: Any) -> None:
                """Keep the stream from its end until the server stops."""
                while next(passes) > 3 and not server.should_exit:
                    time.sleep(0.01)

            layer = pipe.model.get_decoder().layers[0]
            connections.callback(layer.register_forward_pre_hook(hold).remove)
            sent = asking(address, stream=True, max_tokens=tokens)
            answer = connections.enter_context(sent).getresponse()
            lines.append(answer.readline().decode())
            waiting = threading.Thread(target=wait, args=(address,))
            waiting.start()
            eventually(lambda: metrics(address, None)["oscar_mm_waiting"] == 1)
        lines.extend(answer.read().decode().split("\n\n"))
    waiting.join(20)
    yield lines, waited


def test_stopped_with_time_to_end(omni) -> None:
    with stopping(omni, 20, 50) as (lines, [waited]):
        assert [line for line in lines if line][-1] == "data: [DONE]"
        assert waited.status_code == 503 and "stopping" in waited.message


def test_stopped_without(omni) -> None:
    start, before = time.monotonic(), omni.store.memory().used_bytes
    with stopping(omni, 0.2, 5000) as (lines, [waited]):
        assert time.monotonic() - start < 6
        [*_, last] = [line for line in lines if line]
        assert "stopping" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert waited.status_code == 503
    eventually(lambda: omni.store.memory().used_bytes == before)


def test_a_second_signal_ends_the_grace_time(omni, monkeypatch, capfd) -> None:
    """Also of a client that does not read."""
    from oscar_mm.apps.serve import server as serving
    from oscar_mm.apps.serve.service import ServerLimits

    monkeypatch.setattr(serving, "_AFTER_GRACE_S", 0.2)
    app = serving.create_app(omni, "tiny", ServerLimits(grace_s=600))

    async def endless() -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0)
            yield b"x" * (1 << 20)

    app.add_api_route("/endless", lambda: StreamingResponse(endless()))
    with started(app) as (server, address):
        client = http.client.HTTPConnection(address.removeprefix("http://"))
        client.request("GET", "/endless")
        answer = client.getresponse()
        assert answer.read(1) == b"x"
        start = time.monotonic()
        for _ in range(3):
            server.handle_exit(signal.SIGINT, None)
    assert time.monotonic() - start < 5
    client.close()
    assert capfd.readouterr().err == ""


def test_an_image_at_an_address_is_that_image(omni, picture_address, monkeypatch) -> None:
    shown = {"type": "image_url", "image_url": {"url": picture_address}}
    with served(omni) as address:
        client = client_of(address)
        inline = ask(client, user(image(png()), text("What?")))
        with pytest.raises(openai.BadRequestError, match="must be a data URI"):
            ask(client, user(shown, text("What?")))
        monkeypatch.setattr(omni.media_reader, "allow_remote", True)
        fetched = ask(client, user(shown, text("What?")))
    assert fetched.choices[0].message.content == inline.choices[0].message.content
    assert fetched.usage.prompt_tokens == inline.usage.prompt_tokens


def wait_for_idle_workers(service: Any) -> None:
    """Wait until no request uses a worker thread; fail if one still does after 20 s.

    Only if all threads are idle do as many functions as threads meet at a barrier.
    """
    count = service.limits.running + 1
    barrier = threading.Barrier(count, timeout=20)
    for met in [service.queue.workers.submit(barrier.wait) for _ in range(count)]:
        met.result()


@pytest.mark.parametrize("messages", [[user("Why?")], [user("Why?"), user("And who?")]])
@pytest.mark.parametrize("more", [{}, {"prompt_logprobs": 0}])
def test_prompts_that_are_read_take_no_threads(omni, messages: Any, more: dict[str, Any]) -> None:
    from oscar_mm.apps.serve.server import create_app
    from oscar_mm.apps.serve.service import ServerLimits

    begun, go_on = threading.Event(), threading.Event()

    def first_layer(*_: Any) -> None:
        begun.set()
        go_on.wait(20)

    app = create_app(omni, "tiny", ServerLimits())
    hook = omni.model.get_decoder().layers[0].register_forward_pre_hook(first_layer)
    try:
        with started(app) as (_, address), asking(address, messages=messages, **more) as asked:
            assert begun.wait(20)
            wait_for_idle_workers(app.state.service)
            go_on.set()
            answer = json.loads(asked.getresponse().read())
            assert answer["usage"]["completion_tokens"] == 6
    finally:
        hook.remove()


def test_streams_take_no_threads(omni) -> None:
    from oscar_mm.apps.serve.server import create_app
    from oscar_mm.apps.serve.service import ServerLimits

    app = create_app(omni, "tiny", ServerLimits(max_new_tokens=2000))
    with started(app) as (_, address), ExitStack() as streams:
        running = [streams.enter_context(one_running(address)) for _ in range(5)]
        for stream in running:
            next(iter(stream))
        wait_for_idle_workers(app.state.service)
        assert metrics(address, None)["oscar_mm_decoding"] == 5


def test_pieces_are_sent_together_if_sending_takes_long(omni, monkeypatch) -> None:
    with served(omni) as address:
        how = {"stream": True, "max_tokens": 60}
        usual = list(ask(client_of(address), user("Why?"), **how))
        # As if sending took 25 times as long.
        monkeypatch.setattr("oscar_mm.apps.serve.piece_sender._SHARE", 0.15 / 25)
        monkeypatch.setattr("oscar_mm.apps.serve.piece_sender._MAX_BURST_S", 1e-4)
        rare = list(ask(client_of(address), user("Why?"), **how))
        counted = metrics(address, None)
    texts = [[part.choices[0].delta.content or "" for part in one] for one in (usual, rare)]
    assert "".join(texts[0]) == "".join(texts[1])
    assert len(rare) < len(usual) - 10
    assert rare[-1].choices[0].finish_reason == "length"
    assert counted['oscar_mm_tokens_total{kind="completion"}'] == 120
    # Each piece has an interval, also if several are sent together.
    assert counted["oscar_mm_inter_token_seconds_count"] > len(usual) + len(rare)


def test_first_pieces_do_not_wait_for_pieces_of_others(omni, monkeypatch) -> None:
    # Only first pieces are sent.
    monkeypatch.setattr("oscar_mm.apps.serve.piece_sender._MAX_BURST_S", 0)
    with served(omni, max_new_tokens=4000) as address:
        how = {"stream": True, "max_tokens": 3000}
        long = ask(client_of(address), user("Why?"), **how)
        assert next(iter(long)).choices
        paused, begin = ask(client_of(address), user("And who?"), **how), time.monotonic()
        for stream in (paused, ask(client_of(address), user("And when?"), **how)):
            assert any(part.choices[0].delta.content for part in stream)
            stream.close()
        assert time.monotonic() - begin < 30
        long.close()


def test_a_token_that_comes_while_pieces_are_taken(omni, monkeypatch) -> None:
    """Its piece is sent without waiting for the next token, and it is counted once."""
    take_pieces, takes, sent = Request.take_pieces, list[Request](), threading.Event()
    begun = threading.Event()
    awaited = iter([begun])

    def take_before_the_first_token(self: Request) -> list[Any]:
        pieces = take_pieces(self)
        if not takes:
            takes.append(self)
            begun.set()
            eventually(lambda: self.is_ready)
        return pieces

    def wait(*_: Any) -> None:
        next(awaited, sent).wait(20)  # The prompt's pass, and later ones.

    monkeypatch.setattr(Request, "take_pieces", take_before_the_first_token)
    hook = omni.model.get_decoder().layers[0].register_forward_pre_hook(wait)
    try:
        with served(omni) as address, asking(address, stream=True) as asked:
            answer = asked.getresponse()
            while b'"delta": {"content"' not in (line := answer.readline()):
                assert line
            assert not sent.is_set()
            sent.set()
            answer.read()
            assert metrics(address, None)['oscar_mm_tokens_total{kind="completion"}'] == 6
    finally:
        sent.set()
        hook.remove()


@pytest.mark.slow
def test_a_client_that_does_not_read_stops_nobody(omni) -> None:
    with served(omni, max_new_tokens=4000) as address:
        with asking(address, stream=True, max_tokens=4000):
            answer = ask(client_of(address), user("Why?"), stream=True, max_tokens=300)
            assert sum(len(part.choices) for part in answer) > 100
        eventually(lambda: metrics(address, None)["oscar_mm_running"] == 0)


def test_a_head_without_end_is_refused(omni) -> None:
    """Also where httptools is installed, as vLLM does, which has no bound of its own."""
    with served(omni) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as client:
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Long: ")
            with pytest.raises(OSError):
                for _ in range(64):
                    client.sendall(b"a" * (1 << 20))
        assert ask(client_of(address), user("Why?"), max_tokens=3).choices[0].message.content
