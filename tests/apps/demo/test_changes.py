"""Streams of events about changes by other pages."""

from __future__ import annotations

import asyncio

from oscar_mm.apps.demo.changes import Changes


def test_more_streams_than_the_limit_end_the_oldest() -> None:
    """A flood of streams cannot take all connections of the server."""

    async def listen() -> None:
        changes = Changes(3)
        streams = [changes.stream([f"page{number}"]) for number in range(5)]
        async with asyncio.timeout(5):
            for stream in streams:
                assert await anext(stream) == ":\n\n"
            for stream in streams[:2]:
                assert await anext(stream, None) is None
            changes.tell(*(f"page{number}" for number in range(5)))
            told = [await anext(stream) for stream in streams[2:]]
            assert told == [f"data: page{number}\n\n" for number in range(2, 5)]
            await streams[2].aclose()  # A browser that leaves makes room.
            assert await anext(one := changes.stream(["page5"])) == ":\n\n"
            changes.tell("page3")
            assert await anext(streams[3]) == "data: page3\n\n"
            changes.close()
            assert [await anext(s, None) for s in (*streams[3:], one)] == [None] * 3

    asyncio.run(listen())
