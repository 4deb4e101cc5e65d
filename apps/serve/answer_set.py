"""AnswerSet: the answers to one request, its choices, which run at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from oscar_mm.apps.serve.conversations import CompletedAnswer, Conversations
from oscar_mm.apps.serve.protocol import Request
from oscar_mm.apps.serve.running_answer import Places, RunningAnswer

_SEEDS = 1 << 63


class Choice(NamedTuple):
    """A complete answer.

    Attributes:
        completed: the answer.
        logprobs: those that were not taken yet, as the protocol has them; None without.
    """

    completed: CompletedAnswer
    logprobs: dict[str, Any] | None


class AnswerSet:
    """The answers to one request.

    The first one reads the prompt; the others begin after that, and find its beginning in the
    prefix cache, or the past of their conversation in the chat that is kept.

    Args:
        places: has a place taken for each answer, and gets them back.
        conversations, gone, arrival: as of ``RunningAnswer``.
        request: the request; a seed is that of its first answer, and others have the next ones.

    Attributes:
        answers: in the order of their index.
    """

    def __init__(
        self,
        places: Places,
        conversations: Conversations,
        request: Request,
        gone: asyncio.Future[None],
        arrival: float,
    ) -> None:
        self.places, self.request = places, request
        self.answers = [
            RunningAnswer(places, conversations, _part(request, index), gone, arrival)
            for index in range(request.n)
        ]

    async def begin(self, room_s: float) -> None:
        """Begin all answers.

        Args:
            room_s: seconds in which there must be memory for each.

        Raises:
            Refusal: there is no answer; the message says why.
        """
        first, *others = self.answers
        await first.begin(room_s)
        await asyncio.gather(*(answer.begin(room_s) for answer in others))

    async def complete(self) -> None:
        """Return when all are complete.

        Raises:
            Refusal: one ends before; the message says why.
        """
        await asyncio.gather(*map(_complete, self.answers))

    def complete_choices(self) -> list[Choice]:
        """All answers, once they are complete."""
        return [Choice(answer.completed, answer.take_logprobs()) for answer in self.answers]

    def end(self) -> asyncio.Future[Any]:
        """Close all answers and free their places, once the model has ended its step."""
        return asyncio.gather(*(answer.end() for answer in self.answers))

    def outlive_client(self) -> None:
        """Go on until ``end``, whether the client has left or not."""
        for answer in self.answers:
            answer.gone = asyncio.get_running_loop().create_future()

    @property
    def written(self) -> int:
        """Tokens of all complete answers."""
        return sum(len(answer.completed.answer.token_ids) for answer in self.answers)

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens of the prompt and of all answers; memory of the first one's conversation."""
        usage = self.answers[0].completed.usage
        total = usage["prompt_tokens"] + self.written
        return usage | {"completion_tokens": self.written, "total_tokens": total}


def _part(request: Request, index: int) -> Request:
    """The request for one of several answers."""
    if request.n == 1:
        return request
    sampling = dict(request.sampling)
    if "seed" in sampling:
        sampling["seed"] = (sampling["seed"] + index) % _SEEDS
    # Others begin after its first piece, which one that is not streamed does not tell.
    return replace(request, sampling=sampling, stream=True)


async def _complete(answer: RunningAnswer) -> None:
    async for _ in answer.pieces():
        pass


async def merged(streams: Sequence[AsyncIterator[str]]) -> AsyncIterator[str]:
    """Yield what comes of several streams as it comes; the first error ends all."""
    arrived: asyncio.Queue[str | Exception | None] = asyncio.Queue()

    async def drain(stream: AsyncIterator[str]) -> None:
        try:
            async for event in stream:
                arrived.put_nowait(event)
            arrived.put_nowait(None)
        except Exception as error:
            arrived.put_nowait(error)

    tasks = [asyncio.ensure_future(drain(stream)) for stream in streams]
    try:
        left = len(tasks)
        while left:
            event = await arrived.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                left -= 1
            else:
                yield event
    finally:
        for task in tasks:
            task.cancel()
