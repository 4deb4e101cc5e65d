"""AnswerSet: all answers (choices) to a request, generated concurrently."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from oscar_mm.apps.serve.completed import CompletedAnswer
from oscar_mm.apps.serve.conversations import Conversations
from oscar_mm.apps.serve.fair_queue import Slot
from oscar_mm.apps.serve.protocol import ApiRequest
from oscar_mm.apps.serve.request_queue import RequestQueue
from oscar_mm.apps.serve.running_answer import RunningAnswer
from oscar_mm.engine.logprobs import TokenLogprob

_SEEDS = 1 << 63


class Choice(NamedTuple):
    """A complete answer and its remaining log-probabilities.

    Attributes:
        completed: the complete answer and its token usage.
        logprobs: log-probabilities not yet sent with a piece of text; None if none were requested.
    """

    completed: CompletedAnswer
    logprobs: Sequence[TokenLogprob] | None

    @property
    def likelihood(self) -> float:
        """Sum of the log-probabilities of the answer's tokens."""
        return sum(one.logprob for one in self.completed.answer.logprobs or ())


class AnswerSet:
    """All answers to one HTTP request, which may have several prompts with several answers each.

    The first answer to a prompt processes the prompt. The other answers start after that and reuse
    the prompt from the prefix cache, or the conversation's earlier turns from the stored chat.

    Args:
        queue: request queue to which each answer returns its slot.
        slots: one slot per answer.
        conversations, gone, arrival: see ``RunningAnswer``.
        requests: one request per prompt. The first answer to a prompt uses the request's seed,
            the second answer seed + 1, and so on.

    Attributes:
        answers: all answers, in the order of their indices in the response.
    """

    def __init__(
        self,
        queue: RequestQueue,
        slots: Sequence[Slot],
        conversations: Conversations,
        requests: Sequence[ApiRequest],
        gone: asyncio.Future[None],
        arrival: float,
    ) -> None:
        self.queue, self._kept = queue, requests[0].n
        free = iter(slots)
        self._groups = [
            [
                RunningAnswer(
                    queue, next(free), conversations, _part(request, index), gone, arrival
                )
                for index in range(request.count)
            ]
            for request in requests
        ]
        self.answers = [answer for group in self._groups for answer in group]

    async def begin(self, memory_wait_s: float) -> None:
        """Start all answers.

        Args:
            memory_wait_s: maximum seconds that each answer waits for memory.

        Raises:
            Refusal: if an answer cannot start; the message says why.
        """

        async def begin_group(first: RunningAnswer, *others: RunningAnswer) -> None:
            await first.begin(memory_wait_s)
            await asyncio.gather(*(answer.begin(memory_wait_s) for answer in others))

        await asyncio.gather(*(begin_group(*group) for group in self._groups))

    async def complete(self) -> None:
        """Wait until all answers are complete.

        Raises:
            Refusal: if an answer ends early; the message says why.
        """
        await asyncio.gather(*map(_complete, self.answers))

    def complete_choices(self) -> list[Choice]:
        """Return the answers for the response; call this once all are complete.

        With ``best_of``, return only the ``n`` likeliest answers to each prompt, best first.
        """
        choices: list[Choice] = []
        for group in self._groups:
            found = [Choice(answer.completed, answer.take_logprobs()) for answer in group]
            if len(found) > self._kept:
                found = sorted(found, key=lambda choice: -choice.likelihood)[: self._kept]
            # Only the first answer of a group computes the prompt's log-probabilities.
            of_prompt = group[0].completed.answer.prompt_logprobs
            choices += [_with_prompt(choice, of_prompt) for choice in found]
        return choices

    def end(self) -> asyncio.Future[Any]:
        """Close all answers, and free their slots once the model has finished its current step."""
        return asyncio.gather(*(answer.end() for answer in self.answers))

    def outlive_client(self) -> None:
        """Keep the answers running until ``end``, even if the client disconnects."""
        for answer in self.answers:
            answer.gone = asyncio.get_running_loop().create_future()

    @property
    def written(self) -> int:
        """Total number of tokens in all complete answers."""
        return sum(answer.completed.tokens for answer in self.answers)

    @property
    def usage(self) -> dict[str, Any]:
        """Token usage summed over all prompts and answers; other fields are the first answer's."""
        usage = self.answers[0].completed.usage
        read = sum(group[0].completed.prompt_tokens for group in self._groups)
        counts = {"prompt_tokens": read, "completion_tokens": self.written}
        return usage | counts | {"total_tokens": read + self.written}


def _part(request: ApiRequest, index: int) -> ApiRequest:
    """Return a copy of the request for the answer with this index."""
    if request.count == 1:
        return request
    sampling = dict(request.sampling)
    if "seed" in sampling:
        sampling["seed"] = (sampling["seed"] + index) % _SEEDS
    if request.best_of > request.n:
        sampling.setdefault("logprobs", 0)  # Needed to find the likeliest answers.
    if index:
        sampling.pop("prompt_logprobs", None)  # The first answer computes them.
    # The other answers start after the first piece of this one, so it must be streamed.
    return replace(request, sampling=sampling, stream=True)


def _with_prompt(choice: Choice, found: list[TokenLogprob] | None) -> Choice:
    answer = replace(choice.completed.answer, prompt_logprobs=found)
    return choice._replace(completed=replace(choice.completed, answer=answer))


async def _complete(answer: RunningAnswer) -> None:
    async for _ in answer.pieces():
        pass


async def merged(
    streams: Sequence[AsyncIterator[str | bytes]],
) -> AsyncIterator[str | bytes]:
    """Yield the items of several streams as they arrive; the first error ends all of them."""
    arrived: asyncio.Queue[str | bytes | Exception | None] = asyncio.Queue()

    async def drain(stream: AsyncIterator[str | bytes]) -> None:
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
