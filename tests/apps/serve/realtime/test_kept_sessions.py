"""Realtime sessions to which their clients return by id."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from openai import AsyncOpenAI
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect as raw_connect

from oscar_mm.apps.serve.kept_sessions import KeptSession, KeptSessions
from oscar_mm.apps.serve.realtime import Realtime
from oscar_mm.apps.serve.realtime_items import Entry, RealtimeItems
from oscar_mm.apps.serve.realtime_responses import RealtimeResponses
from oscar_mm.apps.serve.refusals import Refusal
from oscar_mm.apps.serve.server import create_app
from oscar_mm.apps.serve.service import ServerLimits
from oscar_mm.engine.message import Message
from tests.apps.serve.conftest import png, started
from tests.apps.serve.realtime.client import (
    KEY,
    PUSH,
    RATE,
    Talk,
    ask,
    connected,
    held,
    show,
    sound,
    talked,
)
from tests.apps.serve.realtime.conftest import SmallServer

TEXT = {**PUSH, "output_modalities": ["text"], "max_output_tokens": 6}


@pytest.fixture
def sessions(server: Any, pipe: Any) -> Iterator[KeptSessions]:
    """The server's kept sessions; once they expire, the server must hold nothing."""
    kept = server[0].service.conversations.sessions
    yield kept
    deadline = time.monotonic() + 10
    while (found := (len(kept), held(server, pipe))) != (0, (0, 0.0, 0.0, 0)):
        for one in [*kept._kept.values()]:
            kept.expire(one)
        assert time.monotonic() < deadline, found
        time.sleep(0.02)


async def kept_one(sessions: KeptSessions) -> KeptSession:
    async with asyncio.timeout(10):
        while not len(sessions):
            await asyncio.sleep(0.01)
    return next(iter(sessions._kept.values()))


def test_a_conversation_goes_on_in_another_connection(
    server: Any, sessions: KeptSessions, pipe: Any
) -> None:
    """It has the items, settings and answers of a chat that nobody interrupted."""
    answers, cached, items = list[str](), list[int](), list[list[Any]]()

    async def turn(one: Talk, number: int) -> None:
        await one.say(sound(1.3 + number, seed=number), size=5000)
        await one.connection.input_audio_buffer.commit()
        await one.connection.response.create()
        done = (await one.until("response.done")).response
        answers.append(done.output[0].content[0].text)
        cached.append(done.usage.input_token_details.cached_tokens)

    async def talk() -> None:
        async with connected(server[1], keep="true") as one:
            created = one.seen[0].session
            update = TEXT | {"instructions": "Be brief."}
            await one.connection.session.update(session=update)
            await turn(one, 0)
            items.append([x.item for x in one.seen if x.type == "conversation.item.done"])
            await ask_later(one, "Listen:")
            items[0].append((await one.until("conversation.item.done")).item)
            await one.say(sound(0.5))  # It is not committed.
        async with connected(server[1], session=created.id) as one:
            again = one.seen[0].session
            assert again.id == created.id
            assert (again.instructions, again.output_modalities) == ("Be brief.", ["text"])
            assert again.audio.input.turn_detection is None
            added = [(await one.until("conversation.item.added")) for _ in items[0]]
            assert [x.item.id for x in added] == [x.id for x in items[0]]
            assert [x.previous_item_id for x in added] == [None, *(x.id for x in items[0][:-1])]
            await turn(one, 1)

    asyncio.run(talk())
    with pipe.chat("Be brief.") as chat, chat.listen(RATE) as listening:
        for number in range(2):
            if number:
                listening.add(Message("user", ("Listen:",)))
            heard = (sound(1.3 + number, seed=number) * 32767).astype("<i2").astype(np.float32)
            listening.hear(heard / 32768)
            listening.commit()
            assert listening.ask(max_new_tokens=6).text == answers[number]
        assert cached == [0, chat.turns[1].start]


async def ask_later(one: Talk, text: str) -> None:
    part = {"type": "input_text", "text": text}
    item = {"type": "message", "role": "user", "content": [part]}
    await one.connection.conversation.item.create(item=item)


def test_an_answer_that_a_lost_connection_cut_can_be_truncated(
    server: Any, sessions: KeptSessions
) -> None:
    """The official client returns by itself; what was not sent was not heard."""
    lost = list[int]()

    async def talk() -> None:
        client = AsyncOpenAI(base_url=f"{server[1]}/v1", api_key=KEY)

        def again(event: Any) -> Any:
            lost.append(event.close_code)
            return {"extra_query": {"session": key}}

        query = {"keep": "true"}
        how: dict[str, Any] = {"extra_query": query, "on_reconnecting": again}
        async with client.realtime.connect(model="tiny", **how) as connection:
            one, events = Talk(connection), aiter(connection)
            one.receive = lambda: anext(events)  # Only iteration connects again.
            key = (await one.until("session.created")).session.id
            await one.connection.session.update(session=PUSH | {"max_output_tokens": 60})
            await ask(one, "What is it?")
            await one.until("response.output_audio.delta")
            connection._connection.transport.abort()
            await one.until("session.created")
            added = [await one.until("conversation.item.done") for _ in range(2)]
            item = added[1].item
            assert item.status == "incomplete" and item.role == "assistant"
            # What the server has sent, some of which was lost on the way.
            state = sessions_of(server, key).find(item.id)
            assert state.speech_ms > 1 and 1 < state.tokens < 60
            left = state.tokens_within(1)
            end = {"item_id": item.id, "content_index": 0, "audio_end_ms": 1}
            await connection.conversation.item.truncate(**end)
            await one.until("conversation.item.truncated")
            assert state.tokens == left < 60
            await ask(one, "And?")
            await one.until("response.done")

    asyncio.run(talk())
    assert len(lost) == 1


def sessions_of(server: Any, key: str) -> Any:
    """The items of an open session."""
    from oscar_mm.apps.serve.realtime_session import RealtimeSession

    found = [x for x in gc.get_objects() if isinstance(x, RealtimeSession) and x.id == key]
    return found[-1]._items


def test_a_second_connection_takes_over(server: Any, sessions: KeptSessions) -> None:
    """Also several at once, of which the last goes on."""

    async def talk() -> None:
        async with connected(server[1], keep="true") as first:
            key = first.seen[0].session.id
            await first.connection.session.update(session=PUSH | {"max_output_tokens": 190})
            await ask(first, "What is it?")
            await first.until("response.output_audio.delta")
            async with connected(server[1], session=key) as second:
                with pytest.raises(ConnectionClosed) as closed:
                    while True:
                        await first.connection.recv()
                assert closed.value.rcvd is not None and closed.value.rcvd.code == 1000
                assert "another connection" in closed.value.rcvd.reason
                added = [(await second.until("conversation.item.done")).item for _ in range(2)]
                assert added[1].status == "incomplete"
                several = [asyncio.ensure_future(lasting(key)) for _ in range(3)]
                ended = await asyncio.gather(*several)
                assert sum(ended) == 1
                with pytest.raises(ConnectionClosed):
                    while True:
                        await second.connection.recv()

    async def lasting(key: str) -> bool:
        with suppress(ConnectionClosed):
            async with connected(server[1], session=key) as one:
                await one.connection.session.update(session=TEXT)
                await one.until("session.updated")
                await asyncio.sleep(1)
                await ask(one, "And?")
                await one.until("response.done")
                return True
        return False

    asyncio.run(talk())


def test_a_refused_client_leaves_the_connection_open(
    server: Any, sessions: KeptSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that asks for another model, and one whose address has all sessions it may have."""
    monkeypatch.setattr(server[0].service, "names", ("tiny", "other"))
    uri = server[1].replace("http", "ws") + "/v1/realtime?model=tiny"
    headers = {"Authorization": f"Bearer {KEY}"}
    here: dict[str, Any] = {"additional_headers": headers, "source_address": ("127.0.0.1", 0)}
    elsewhere = here | {"source_address": ("127.0.0.2", 0)}
    with raw_connect(f"{uri}&keep=true", **here) as first, raw_connect(uri, **elsewhere):
        key = json.loads(first.recv(5))["session"]["id"]
        other, same = uri.replace("tiny", "other"), f"{uri}&session={key}"
        with raw_connect(uri, **elsewhere):
            for query, how, status in (
                (f"{other}&session={key}", here, 400),
                (same, elsewhere, 503),
            ):
                with pytest.raises(InvalidStatus) as refused:
                    raw_connect(query, **how)
                assert refused.value.response.status_code == status
                first.send('{"type": "input_audio_buffer.clear"}')
                assert json.loads(first.recv(5))["type"] == "input_audio_buffer.cleared"
        with raw_connect(same, **here) as second:
            assert json.loads(second.recv(5))["session"]["id"] == key


def test_a_stranger_gets_nothing(server: Any, sessions: KeptSessions) -> None:
    talked(server[1], nothing)
    uri = server[1].replace("http", "ws") + "/v1/realtime?"
    headers = {"Authorization": f"Bearer {KEY}"}
    with raw_connect(uri + "keep=true", additional_headers=headers) as client:
        key = json.loads(client.recv(5))["session"]["id"]
    for query, sent, status in (
        (f"session={key}", {}, 401),
        (f"session={key}", {"Authorization": "Bearer wrong"}, 401),
        (f"session={key}&model=other", headers, 404),
        (f"session={key.upper()}", headers, 404),
        (f"session={key[:-1]}", headers, 404),
        (f"session={key}%00", headers, 404),
        (f"session={key.replace('sess', 'conv')}", headers, 404),
        ("session=", headers, 404),
        ("session=sess_*", headers, 404),
        (f"session={quote('../é☃' * 500)}", headers, 404),
        (f"session={'a' * 20_000}", headers, 404),
        ("session=%ff%fe", headers, 404),
        ("keep=maybe", headers, 400),
        ("keep=", headers, 400),
    ):
        with pytest.raises(InvalidStatus) as refused:
            raw_connect(uri + query, additional_headers=sent)
        response = refused.value.response
        assert response.status_code == status, query
        if status == 404 and "model" not in query:
            assert json.loads(response.body)["error"]["code"] == "session_not_found"
    # Neither do those that were not to be kept, and none of these attempts disturbs the session.
    with raw_connect(uri, additional_headers=headers) as client:
        other = json.loads(client.recv(5))["session"]["id"]
    for wanted, keep, found in ((other, "", False), (key, "&keep=false", True), (key, "", False)):
        assert returns(f"{uri}session={wanted}{keep}", headers) is found, (wanted, keep)
        deadline = time.monotonic() + 5
        while held(server, server[0].service.conversations.pipe)[3] and time.monotonic() < deadline:
            time.sleep(0.02)


def returns(uri: str, headers: dict[str, str]) -> bool:
    """Whether a client can resume the session whose id is in an address."""
    try:
        with raw_connect(uri, additional_headers=headers) as client:
            created = json.loads(client.recv(5))["session"]
    except InvalidStatus:
        return False
    return f"session={created['id']}" in uri


async def nothing(_: Talk) -> None:
    pass


def test_a_kept_session_expires(pipe: Any) -> None:
    limits = ServerLimits(api_key=KEY, realtime_kept_s=0.5)

    async def talk(address: str) -> str:
        async with connected(address, keep="true") as one:
            await one.connection.session.update(session=TEXT)
            await ask(one, "What is it?")
            await one.until("response.done")
            return one.seen[0].session.id

    with started(create_app(pipe, "tiny", limits)) as both:
        key = asyncio.run(talk(both[1]))
        asyncio.run(kept_one(both[0].service.conversations.sessions))
        assert held(both, pipe)[0] > 0
        deadline = time.monotonic() + 10
        while held(both, pipe)[0]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with pytest.raises(InvalidStatus) as refused:
            asyncio.run(_begin(both[1], session=key))
        assert refused.value.response.status_code == 404
        asyncio.run(talk(both[1]))
    assert pipe.engine.call(lambda: pipe.store.memory().used_bytes) == 0  # The server has ended.


async def _begin(address: str, **query: str) -> None:
    async with connected(address, **query):
        pass


def test_kept_sessions_are_moved_to_disk(small_server: SmallServer) -> None:
    """Three conversations do not fit into memory together; the first goes on where it was."""
    keys = list[str]()

    async def talk(number: int, **query: str) -> None:
        async with connected(small_server.address, **query) as one:
            keys.append(one.seen[0].session.id)
            await small_server.ask(one, number)

    for number in range(3):
        asyncio.run(talk(number, keep="true"))
    asyncio.run(talk(0, session=keys[0]))
    small_server.check()


def test_what_a_lost_connection_had_asked_is_asked_again(
    server: Any, sessions: KeptSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question whose answer has not begun, with an image and a recording, remains a question."""
    used, begin = list[Any](), RealtimeResponses._first_piece

    async def late(self: Any, response: Any) -> Any:
        await response.cut
        return await begin(self, response)

    async def talk() -> None:
        monkeypatch.setattr(RealtimeResponses, "_first_piece", late)
        async with connected(server[1], keep="true") as one:
            key = one.seen[0].session.id
            await one.connection.session.update(session=TEXT)
            await show(one, png(), "Look.")
            await one.say(sound(20.0), size=RATE * 10)
            await one.connection.input_audio_buffer.commit()
            await one.connection.response.create()
            await one.until("response.created")
            one.connection._connection.transport.abort()
        monkeypatch.setattr(RealtimeResponses, "_first_piece", begin)
        async with connected(server[1], session=key) as one:
            await one.connection.response.create()
            used.append((await one.until("response.done")).response.usage)

    asyncio.run(talk())
    details = used[0].input_token_details
    assert (details.audio_tokens, details.image_tokens) == (260, 6)


def test_a_client_returns_while_its_session_expires(pipe: Any) -> None:
    """The timer has fired, and no thread has freed the session yet."""
    with started(create_app(pipe, "tiny", ServerLimits(api_key=KEY, realtime_kept_s=0.3))) as both:
        sessions = both[0].service.conversations.sessions
        sessions.expire = lambda _: None  # The thread that would close it is late.

        async def talk() -> str:
            async with connected(both[1], keep="true") as one:
                key = one.seen[0].session.id
            await kept_one(sessions)
            await asyncio.sleep(0.6)
            async with connected(both[1], session=key, keep="false") as one:
                return one.seen[0].session.id == key

        assert asyncio.run(talk())


def test_sessions_that_gave_way_leave_no_timers(pipe: Any) -> None:
    app = create_app(pipe, "tiny", ServerLimits(api_key=KEY))
    with started(app) as both:
        sessions = both[0].service.conversations.sessions
        sessions._limit = 2

        async def talk() -> None:
            for _ in range(5):
                async with connected(both[1], keep="true"):
                    pass
            while both[0].service.metrics.realtime._value.get():
                await asyncio.sleep(0.01)

        asyncio.run(asyncio.wait_for(talk(), 20))
        [realtime] = [
            one for one in gc.get_objects() if isinstance(one, Realtime) and one._kept is sessions
        ]
        assert len(sessions) == 2
        assert {*realtime._expiries} == {*named(sessions)}


def test_a_client_that_reads_its_items_slowly_does_not_stay(
    pipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of a session counts from its beginning, not from the last item that was sent."""

    async def slowly(_: Any) -> None:
        await asyncio.sleep(30)

    monkeypatch.setattr(RealtimeItems, "send_all", slowly)
    with started(create_app(pipe, "tiny", ServerLimits(api_key=KEY, realtime_s=0.5))) as both:

        async def talk() -> Any:
            async with connected(both[1]) as one, asyncio.timeout(5):
                with pytest.raises(ConnectionClosed) as closed:
                    await one.connection.recv()
                return closed.value.rcvd

        assert "too long" in asyncio.run(talk()).reason


def test_other_clients_go_on_while_all_items_are_sent(pipe: Any) -> None:
    """Events that the connection takes at once do not keep the server's loop."""

    async def talk() -> None:
        sent = list[str]()

        async def send_event(kind: str, **_: Any) -> None:
            sent.append(kind)

        tasks: Any = SimpleNamespace(send_event=send_event)
        with pipe.chat() as chat:
            items = RealtimeItems(chat, tasks, None, 1000)  # pyright: ignore[reportArgumentType]
            for number in range(50):
                await items.add(Entry({"id": str(number)}), done=False)
            sent.clear()
            sending = asyncio.ensure_future(items.send_all())
            await asyncio.sleep(0)
            assert 0 < len(sent) < 100
            await sending
            assert len(sent) == 100
            items.close()

    asyncio.run(talk())


def test_an_answer_that_fails_after_a_lost_connection_leaves_no_item(
    server: Any, sessions: KeptSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No answer remains ``in_progress`` that no event will ever end."""
    send = RealtimeResponses._send_piece

    async def failing(self: Any, response: Any, *rest: Any) -> None:
        await send(self, response, *rest)
        if response.text:
            await response.cut
            raise Refusal(500, "the engine has failed")

    async def talk() -> None:
        monkeypatch.setattr(RealtimeResponses, "_send_piece", failing)
        async with connected(server[1], keep="true") as one:
            key = one.seen[0].session.id
            await one.connection.session.update(session=TEXT)
            await ask(one, "What is it?")
            await one.until("response.output_text.delta")
            one.connection._connection.transport.abort()
        monkeypatch.setattr(RealtimeResponses, "_send_piece", send)
        async with connected(server[1], session=key) as one:
            await one.connection.session.update(session=TEXT)
            await one.until("session.updated")
            added = [x.item for x in one.seen if x.type == "conversation.item.added"]
            assert [(x.role, x.status) for x in added] == [("user", "completed")]

    asyncio.run(talk())


def test_sound_that_is_not_read_counts_to_the_bound(server: Any, sessions: KeptSessions) -> None:
    """The features of short recordings are in memory until the question is read."""

    async def talk() -> int:
        async with connected(server[1], keep="true") as one:
            await one.connection.session.update(session=TEXT)
            for _ in range(5):
                await one.say(sound(6.0), size=RATE * 6)
                await one.connection.input_audio_buffer.commit()
                await one.until("conversation.item.done")
        return (await kept_one(sessions)).size

    assert asyncio.run(talk()) > 400_000


def test_a_committed_recording_keeps_no_samples(pipe: Any) -> None:
    """Its features are enough for the question."""
    with pipe.chat() as chat, chat.listen(RATE) as listening:
        listening.hear(sound(6.0))
        sound_of = weakref.ref(listening._turn.going_on._sound)
        assert sound_of() is not None
        listening.commit()
        gc.collect()
        assert sound_of() is None


@dataclass(eq=False)
class Items:
    """Items of a session, of which only the sizes are real."""

    size: int = 0
    closed: bool = field(default=False, init=False)

    def close(self) -> None:
        self.closed = True


def kept(name: str, address: str, size: int = 0, *, pinned: bool = False) -> KeptSession:
    items: Any = Items(size)
    return KeptSession(items, {"id": name}, None, address, pinned)


def named(store: KeptSessions) -> list[str]:
    return [*store._kept]


def test_the_client_with_most_sessions_loses_its_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    store = KeptSessions(4)
    first = [kept(f"a{number}", "a") for number in range(2)]
    for one in (*first, *(kept(f"b{number}", "b") for number in range(6))):
        store.add(one)
    assert named(store) == ["a0", "a1", "b4", "b5"]
    monkeypatch.setattr("oscar_mm.apps.serve.kept_sessions.MAX_BYTES", 1000)
    large = kept("c0", "c", 900)
    for one in (kept("b6", "b", 200), large):
        store.add(one)
    assert named(store) == ["a0", "a1", "b5", "b6"] and large.items.closed
    assert store.take(first[0]) and not store.take(first[0]) and len(store) == 3
    store.close()
    late = kept("d0", "d")
    store.add(late)
    assert first[1].items.closed and late.items.closed
    assert not first[0].items.closed and len(store) == 0


def test_sessions_give_way_if_nothing_else_frees_memory() -> None:
    store = KeptSessions(4)
    for one in (kept("a", "1"), kept("b", "2", pinned=True), kept("c", "3")):
        store.add(one)
    assert [store.give_way(spills=True) for _ in range(2)] == [True, False]
    assert named(store) == ["a", "c"]
    assert [store.give_way(spills=False) for _ in range(3)] == [True, True, False]
