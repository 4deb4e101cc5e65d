"""DecodeRunner: rows that decode together, one more token of each at every step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from oscar_mm.cache.cache import OscarCache
from oscar_mm.engine.logprobs import TokenLogprob
from oscar_mm.engine.prefill import read_prompt
from oscar_mm.engine.prompt import Prompt
from oscar_mm.engine.sampling import BROKEN, NAN, SampledTokens, Sampler, Sampling, SamplingState
from oscar_mm.engine.think_tokens import ThinkTokens
from oscar_mm.fast_decode.graph_runner import GraphRunner
from oscar_mm.modality import PADDING
from oscar_mm.tensor_parallel import TPGroup

_CAPTURED = (1, 2, 4, *range(8, 33, 4), *range(40, 129, 8), *range(144, 257, 16))
"""Numbers of rows of which a step is captured; above the last one its multiples."""


class RequestState:
    """One answer while its tokens are chosen.

    Args:
        sampling: how they are chosen.
        seen: (tokens,) ids that the row has read, without padding.
        position: RoPE position of the answer's first token.
        end_tokens: ids that end the row, if ``sampling`` does not say otherwise.
        bad_words, thinks: as of ``SamplingState``.

    Attributes:
        tokens: that were chosen, without the one that ends the row.
        logprobs: of the tokens, where ``sampling`` asks for them.
        next_logprob: of the token that is taken next.
        ended: whether no more are chosen; the last token is not stored then.
        error: why the row ended; None if nothing went wrong.
    """

    def __init__(
        self,
        sampling: Sampling,
        seen: torch.Tensor,
        position: int,
        end_tokens: frozenset[int],
        bad_words: Sequence[Sequence[int]] = (),
        thinks: ThinkTokens | None = None,
    ) -> None:
        self.end_tokens = sampling.end_tokens(end_tokens)
        self.sampler = SamplingState(sampling, seen, self.end_tokens, bad_words, thinks)
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.next_logprob: TokenLogprob | None = None
        self.ended = False
        self.error: BaseException | None = None
        self._first, self._most = position, sampling.max_new_tokens

    @property
    def position(self) -> int:
        """RoPE position of the last token, which the model has not read yet."""
        return self._first + len(self.tokens) - 1

    @property
    def last_comes(self) -> bool:
        """Whether the next token is the last of ``max_new_tokens``."""
        return len(self.tokens) + 1 >= self._most

    def take(self, token: int) -> None:
        """Take the token that was chosen next; ``BROKEN`` ends the row with an error."""
        if token == BROKEN:
            self.fail(FloatingPointError(NAN))
        elif token in self.end_tokens and not self.sampler.sampling.includes(token):
            self.ended = True
        else:
            ends = self.last_comes or token in self.end_tokens
            self.tokens.append(token)
            if self.next_logprob is not None:
                self.logprobs.append(self.next_logprob)
            self.sampler.note(token)
            self.write(token)
            if (grammar := self.sampler.grammar) is not None:
                ends |= grammar.is_complete
                if (error := grammar.error) is not None:
                    self.fail(error)
            if ends:
                self.ended = True

    def write(self, token: int) -> None:
        """Called with each token, before the row ends with it."""

    def fail(self, error: BaseException) -> None:
        """End the row with an error."""
        self.error, self.ended = error, True


class DecodeRunner:
    """Rows of a cache that decode together.

    Args:
        model: a model of transformers that generates, with attention "oscar" in its decoder.
        cache: of the rows.
        axes: leading axes of position ids, as of ``GraphRunner``.
        device: of the model's inputs.

    Attributes:
        rows: as they are seated; None for a row that nobody looks at.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: OscarCache,
        axes: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self._model, self._cache, self._axes, self._device = model, cache, axes, device
        self._ranks = TPGroup.of(model)
        self.rows: list[RequestState | None] = []
        self._by_size: dict[int, GraphRunner] = {}
        self._choices = Sampler([], device, self._ranks)
        self._chosen: SampledTokens | None = None

    @property
    def records(self) -> bool:
        """Whether steps are captured."""
        return (next(iter(self._by_size.values()), None) or self._steps(1)).records

    def captured_sizes(self, rows: int) -> list[int]:
        """Numbers of rows, from the largest, of which steps of up to so many answers are captured;
        none where steps are eager."""
        most = self.size_for(rows) if self.records else 0
        return [size for size in reversed(_CAPTURED) if size <= most]

    def size_for(self, rows: int) -> int:
        """Rows of the batch that so many answers take: more, where that spares a capture."""
        if not self.records:
            return rows
        fitting = [size for size in _CAPTURED if size >= rows]
        return fitting[0] if fitting else -(-rows // _CAPTURED[-1]) * _CAPTURED[-1]

    def set_rows(self, rows: Sequence[RequestState | None]) -> None:
        """Decode these rows from now on, which are the rows of the cache in this order."""
        self.rows = list(rows)
        samplers = [None if row is None else row.sampler for row in rows]
        self._choices, self._chosen = Sampler(samplers, self._device, self._ranks), None

    def choose(self, logits: torch.Tensor) -> None:
        """Give each row the first token, from (batch, vocabulary) logits of what it has read."""
        self._give(self._choices(logits))

    @property
    def is_ahead(self) -> bool:
        """Whether the next step has been launched."""
        steps = self._by_size.get(len(self.rows))
        return self._chosen is not None and steps is not None and steps.is_ahead

    def step(self, *, ahead: bool = True) -> None:
        """Read the last token of each row, and give each the next one.

        Args:
            ahead: launch the step after it too, where that can be foretold.
        """
        steps, chosen = self._steps(len(self.rows)), self._chosen
        ended = torch.tensor([row is None or row.ended for row in self.rows])
        if chosen is None:
            live = [None if row is None or row.ended else row for row in self.rows]
            last = [0 if row is None else row.tokens[-1] for row in live]
            tokens = torch.tensor(last, device=self._device)
            steps.place([0 if row is None else row.position for row in live])
        else:
            tokens = chosen.tokens
        chosen = self._choices(steps(tokens, ended))
        # The device goes on, where it can, while the host waits for the tokens.
        if ahead:
            last_comes = torch.tensor([row is None or row.last_comes for row in self.rows])
            steps.ahead(chosen.tokens, ended | last_comes)
        self._give(chosen)
        self._chosen = chosen

    def _give(self, chosen: SampledTokens) -> None:
        tokens = chosen.listed()
        logprobs = chosen.logprobs(tokens)
        for place, (row, token) in enumerate(zip(self.rows, tokens, strict=True)):
            if row is not None and not row.ended:
                row.next_logprob = logprobs.get(place)
                row.take(token)

    def _steps(self, rows: int) -> GraphRunner:
        if rows not in self._by_size:
            self._by_size[rows] = GraphRunner(
                self._model, self._cache, rows, self._axes, self._device
            )
        return self._by_size[rows]


@torch.inference_mode()
def decode(
    model: nn.Module,
    prompt: Prompt,
    cache: OscarCache,
    sampling: Sampling | Sequence[Sampling],
    *,
    end_tokens: frozenset[int],
    ended: torch.Tensor | None = None,
) -> Iterator[list[int | None]]:
    """Answer a prompt; an iterator of one token per row and step, None for rows that have ended.

    The token that ends a row is left out. The cache ends up with prompt and answer, without the
    last token where max_new_tokens or the caller ends the answer. Answers of a pipeline come from
    its ``Engine`` instead, whose rows come and go.

    Args:
        model: a model of transformers that generates, with attention "oscar" in its decoder.
        prompt: of one row or several, with padding on the left.
        cache: holds the past, such as earlier turns.
        sampling: for all rows, or for each row one.
        end_tokens: ids that end a row.
        ended: (batch,) bool on the CPU, which rows have ended. The caller may set it for a row
            between two steps.

    Raises:
        FloatingPointError: the model's logits are NaN.
    """
    logits = read_prompt(model, prompt, cache)
    count = len(prompt.modalities)
    samplings = [sampling] * count if isinstance(sampling, Sampling) else list(sampling)
    ids, positions = prompt.inputs["input_ids"].cpu(), prompt.next_position.tolist()
    real = prompt.modalities != PADDING
    rows = [
        RequestState(samplings[row], ids[row][real[row]], positions[row], end_tokens)
        for row in range(count)
    ]
    axes, device = prompt.positions.shape[:-2], prompt.positions.device
    batch = DecodeRunner(model, cache, axes, device)
    batch.set_rows(rows)
    batch.choose(logits)
    ended = torch.zeros(count, dtype=torch.bool) if ended is None else ended
    before = [0] * count
    while True:
        if (error := next((row.error for row in rows if row.error), None)) is not None:
            raise error
        fresh = [
            row.tokens[-1] if len(row.tokens) > known else None
            for row, known in zip(rows, before, strict=True)
        ]
        if fresh == [None] * count:
            return
        before = [len(row.tokens) for row in rows]
        yield fresh
        for row, over in zip(rows, ended.tolist(), strict=True):
            row.ended |= over
        if all(row.ended for row in rows):
            return
        batch.step()
