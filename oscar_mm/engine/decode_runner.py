"""DecodeRunner: decode steps of a batch, one token per row and step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

import numpy as np
import torch
from torch import nn

from oscar_mm.cache.cache import OscarCache
from oscar_mm.engine.device_timer import DeviceTimer, EarlyPass
from oscar_mm.engine.logprobs import TokenLogprob
from oscar_mm.engine.prefill import read_prompt
from oscar_mm.engine.prompt import Prompt
from oscar_mm.engine.sampling import BROKEN, NAN, SampledTokens, Sampler, Sampling, SamplingState
from oscar_mm.engine.think_tokens import ThinkTokens
from oscar_mm.fast_decode.draft_runner import DraftRunner
from oscar_mm.fast_decode.drafts import Drafts
from oscar_mm.fast_decode.graph_runner import GraphRunner
from oscar_mm.fast_decode.prompt_scratch import PromptPiece
from oscar_mm.modality import PADDING
from oscar_mm.ops.decode_tables import upload
from oscar_mm.tensor_parallel import TPGroup

_CAPTURED = (1, 2, 4, *range(8, 33, 4), *range(40, 129, 8), *range(144, 257, 16))
"""Batch sizes for which steps are captured; above the largest, its multiples are captured."""
_BESIDE_PROMPTS = (1, 2, 4, 8, 16, 32, 48, *range(64, 257, 32))
"""Batch sizes, all in ``_CAPTURED``, while prompts are read in the batch's passes. There are few,
since a pass is captured for each of them and each size of a piece. Up to 31 idle rows are at most
3% of a pass of 1,024 rows."""


class RequestState:
    """Sampling state and output tokens of one request.

    Args:
        sampling: sampling options.
        seen: (tokens,) ids before the first sampled token, without padding.
        position: RoPE position of the first sampled token.
        end_tokens: ids that end the row, unless ``sampling`` overrides them.
        bad_words, thinks: see ``SamplingState``.
        adapter: name of the row's adapter, see ``RowAdapters``; None for none.

    Attributes:
        tokens: sampled tokens, without the end token.
        logprobs: log-probabilities of the tokens, if ``sampling`` requests them.
        next_logprob: log-probability of the token to be added next.
        ended: whether the row has ended; its last token is then not stored in the cache.
        error: error that ended the row; None if the row has not failed.
        drafted, accepted: number of drafts made for the row, and of those that were right.
    """

    def __init__(
        self,
        sampling: Sampling,
        seen: torch.Tensor,
        position: int,
        end_tokens: frozenset[int],
        bad_words: Sequence[Sequence[int]] = (),
        thinks: ThinkTokens | None = None,
        adapter: str | None = None,
    ) -> None:
        self.adapter = adapter
        self.end_tokens = sampling.end_tokens(end_tokens)
        self.sampler = SamplingState(sampling, seen, self.end_tokens, bad_words, thinks)
        self.tokens = self.sampler.chosen  # One list, to which the sampler's ``note`` appends.
        self.logprobs: list[TokenLogprob] = []
        self.next_logprob: TokenLogprob | None = None
        self.ended = False
        self.error: BaseException | None = None
        self.drafted = self.accepted = 0
        self._first, self._max_tokens = position, sampling.max_new_tokens

    @property
    def position(self) -> int:
        """RoPE position of the last token, which is the model's next input."""
        return self._first + len(self.tokens) - 1

    @property
    def last_comes(self) -> bool:
        """Whether the next token is the last that ``max_new_tokens`` allows."""
        return len(self.tokens) + 1 >= self._max_tokens

    @property
    def tokens_left(self) -> int:
        """Number of tokens that ``max_new_tokens`` still allows."""
        return self._max_tokens - len(self.tokens)

    @property
    def may_stop(self) -> bool:
        """Whether the text of a token may end the row; for subclasses."""
        return False

    def take(self, token: int) -> None:
        """Append a sampled token; ``BROKEN`` ends the row with an error."""
        if token == BROKEN:
            self.fail(FloatingPointError(NAN))
        elif (ends := token in self.end_tokens) and not self.sampler.sampling.includes(token):
            self.ended = True
        else:
            ends |= self.last_comes
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
        """Receive each new token, before it may end the row; a hook for subclasses."""

    def fail(self, error: BaseException) -> None:
        """End the row with an error."""
        self.error, self.ended = error, True


class DecodeRunner:
    """Decode steps of a batch, with one sampler and one graph runner per batch size.

    Args:
        model: transformers model for generation, with attention "oscar" in its decoder.
        cache: cache of the rows.
        axes: leading axes of the position ids, see ``GraphRunner``.
        device: device of the model's inputs.
        before_wait: function called before each wait for the tokens of a step.

    Attributes:
        rows: rows of the batch; None marks padding.
        piece: piece of prompts that the next launch includes if it can; the caller resets it.
        early: the following pass, if a step has launched it together with the piece; the caller
            resets it.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: OscarCache,
        axes: tuple[int, ...],
        device: torch.device,
        before_wait: Callable[[], object] = lambda: None,
    ) -> None:
        self._model, self._cache, self._axes, self._device = model, cache, axes, device
        self._before_wait = before_wait
        self._ranks = TPGroup.of(model)
        self.rows: list[RequestState | None] = []
        self.piece: PromptPiece | None = None
        self.early: EarlyPass | None = None
        self._by_size: dict[int, GraphRunner] = {}
        self._sampler = Sampler([], device, self._ranks)
        self._has_drafts = self._ranks.count == 1 and Drafts.of(model) is not None
        self._drafts: DraftRunner | None = None
        self._pass_sampler: Sampler | None = None
        """Sampler of all tokens of a pass with drafts, for the current row; None until needed."""
        self._ends = torch.zeros(0, dtype=torch.long, device=device)
        """Ids of the end tokens of the row that ``_pass_sampler`` is for."""
        self._tokens: torch.Tensor | None = None
        """(batch,) ids of each row's last token on the device; None if only the host has them."""

    @property
    def captures(self) -> bool:
        """Whether steps are captured as CUDA graphs."""
        return (next(iter(self._by_size.values()), None) or self._steps(1)).captures

    def captured_sizes(self, rows: int) -> list[int]:
        """Return the captured batch sizes that up to ``rows`` requests use, largest first.

        The list is empty if steps run eagerly.
        """
        largest = self.size_for(rows) if self.captures else 0
        return [size for size in reversed(_CAPTURED) if size <= largest]

    def size_for(self, rows: int, *, beside_prompts: bool = False) -> int:
        """Return the batch size for a number of requests, rounded up to a captured size.

        Args:
            beside_prompts: whether prompts are read in the passes of the batch.
        """
        if not self.captures:
            return rows
        sizes = _BESIDE_PROMPTS if beside_prompts else _CAPTURED
        fitting = [size for size in sizes if size >= rows]
        return fitting[0] if fitting else -(-rows // _CAPTURED[-1]) * _CAPTURED[-1]

    def set_rows(self, rows: Sequence[RequestState | None]) -> None:
        """Set the rows to decode, in the order of the cache's rows."""
        self.rows, self._tokens = list(rows), None
        self._sampler, self._pass_sampler = self._sampler_of(rows), None

    def _sampler_of(self, rows: Sequence[RequestState | None]) -> Sampler:
        samplers = [None if row is None else row.sampler for row in rows]
        return Sampler(samplers, self._device, self._ranks)

    def choose(self, logits: torch.Tensor) -> None:
        """Sample the first token of each row from the (batch, vocabulary) logits of its prompt."""
        _give(self.rows, self._sampler(logits))

    @property
    def is_ahead(self) -> bool:
        """Whether the next step is already in flight."""
        drafts = None if self._drafting is None else self._drafts
        return self._steps_ahead or (drafts is not None and drafts.is_ahead)

    @property
    def _steps_ahead(self) -> bool:
        """Whether the next step without drafts is already in flight."""
        steps = self._by_size.get(len(self.rows))
        return self._tokens is not None and steps is not None and steps.is_ahead

    def step(
        self,
        *,
        ahead: bool = True,
        following: Callable[[], Sequence[RequestState | None]] | None = None,
    ) -> None:
        """Decode one token per row, or more for a single row whose drafts are right.

        Args:
            ahead: whether to also launch the following step, if it can be predicted.
            following: function that sets the cache's rows for the following step and returns them.
                Requests that join replace empty rows; all others keep their rows.
        """
        if (drafting := self._drafting) is not None:
            drafts = following is None and not self._steps_ahead
            if drafts and self._step_drafted(drafting, ahead=ahead):
                return
            ahead = False  # The row's next pass has drafts again.
        rows, steps, tokens = self.rows, self._steps(len(self.rows)), self._tokens
        ended = _flags([row is None or row.ended for row in rows])
        if tokens is None:
            live = [None if row is None or row.ended else row for row in rows]
            last = [0 if row is None else row.tokens[-1] for row in live]
            tokens = upload(np.array(last, np.int64), self._device)
            steps.place([0 if row is None else row.position for row in live], _adapters(live))
        chosen = self._sampler(steps(tokens, ended, self.piece))
        self._tokens = chosen.tokens
        if following is not None:
            self.rows = list(following())
            joining = [
                (place, new)
                for place, (new, old) in enumerate(zip(self.rows, rows, strict=True))
                if new is not old and new is not None
            ]
            self._tokens = self._join(joining, chosen.tokens, steps)
        launched = None
        # Keeps the device busy while the host waits for the tokens.
        if ahead:
            no_more = [
                row is None or row.ended or (row is old and row.last_comes)
                for row, old in zip(self.rows, rows, strict=True)
            ]
            piece = None if self.piece is None or self.piece.logits is not None else self.piece
            begin = None if piece is None else DeviceTimer(self._device)
            steps.ahead(self._tokens, _flags(no_more), piece)
            if piece is not None and begin is not None and piece.logits is not None:
                launched = begin, DeviceTimer(self._device), perf_counter()
        self._before_wait()
        arrived = _give(rows, chosen)
        if launched is not None:
            self.early = EarlyPass(*launched, arrived)
        if following is not None:
            self._pass_sampler = None
            if not (self._sampler.is_plain and all(row.sampler.is_plain for _, row in joining)):
                self._sampler = self._sampler_of(self.rows)

    @property
    def _drafting(self) -> RequestState | None:
        """The only row of the batch if it may draft; None otherwise.

        Drafts follow no grammar and no adapter, so few would be right for a row that has one. A
        deterministic row decodes in its own batch, so that each would need a draft runner with
        states and graphs of its own.
        """
        row = self.rows[0] if self._has_drafts and len(self.rows) == 1 else None
        if row is None or row.ended or row.sampler.grammar is not None or row.adapter is not None:
            return None
        return None if row.sampler.sampling.deterministic else row

    def _step_drafted(self, row: RequestState, *, ahead: bool) -> bool:
        """Decode the tokens of a row up to the first that its draft did not predict.

        The tokens and their distribution are those of ordinary steps: a draft is right if it is the
        token that is sampled from the logits after the tokens before it.

        Args:
            ahead: see ``step``.

        Returns:
            False, without effect, if an ordinary step must follow.
        """
        if self._drafts is None:
            self._drafts = DraftRunner(self._model, self._cache, self._axes, self._device)
        verified = self._drafts(row.tokens[-1], row.position)
        if verified is None:
            return False
        self._tokens = None
        drafts = verified.tokens[1:].to("cpu", non_blocking=True)
        row.drafted += len(drafts)
        sampling, launched = row.sampler.sampling, False
        # Penalties depend on the tokens before, and a seed's generator must not draw for tokens
        # after a rejected draft.
        if sampling.edits_logits or sampling.seed is not None:
            self._before_wait()
            choices = self._one_by_one(row, verified.logits)
        else:
            if self._pass_sampler is None:
                self._pass_sampler = self._sampler_of([row] * (1 + len(drafts)))
                self._ends = upload(np.array([*row.end_tokens], np.int64), self._device)
            chosen = self._pass_sampler(verified.logits)
            # Keeps the device busy while the host waits for the tokens. The device knows all that
            # may end the row before the last of these tokens.
            if ahead and row.tokens_left > 1 + len(drafts) and not row.may_stop:
                accepted = _right_drafts(verified.tokens[1:], chosen.tokens, self._ends)
                launched = self._drafts.launch_following(chosen.tokens, accepted)
            self._before_wait()
            choices = _listed(chosen)
        for place, (token, logprob) in enumerate(choices):
            # With the first token, the drafts have arrived too.
            is_last = place == len(drafts) or token != int(drafts[place])
            is_last |= token == BROKEN or token in row.end_tokens
            row.next_logprob = logprob
            row.take(token)
            # A row that is cancelled meanwhile still gets the tokens that the next pass has read.
            if is_last or (row.ended and not launched):
                row.accepted += place
                self._drafts.finish(place, token if ahead and not row.ended else None)
                break
        return True

    def _one_by_one(
        self, row: RequestState, logits: torch.Tensor
    ) -> Iterator[tuple[int, TokenLogprob | None]]:
        """Yield the tokens sampled from (tokens, vocabulary) logits, and their log-probabilities.

        The caller adds each token to the row before it asks for the next one.
        """
        for one in logits.split(1):
            yield from _listed(self._sampler(one))

    def _join(
        self,
        joining: Sequence[tuple[int, RequestState]],
        tokens: torch.Tensor,
        steps: GraphRunner,
    ) -> torch.Tensor:
        """Return the last tokens of all rows, and set the positions of new ones; never waits for a
        GPU.

        Args:
            joining: place and state of each new row.
            tokens: (batch,) ids of the last tokens of the other rows, which only the device knows.
            steps: runner of the following step.
        """
        table = np.empty((3, len(joining)), np.int64)
        for index, (place, row) in enumerate(joining):
            table[:, index] = place, row.tokens[-1], row.position
        places, new_tokens, positions = upload(table, self._device)
        steps.join(places, positions, _adapters(self.rows))
        return tokens.index_copy(0, places, new_tokens)

    def _steps(self, rows: int) -> GraphRunner:
        if rows not in self._by_size:
            self._by_size[rows] = GraphRunner(
                self._model, self._cache, rows, self._axes, self._device
            )
        return self._by_size[rows]


def _flags(values: list[bool]) -> torch.Tensor:
    """Return a bool tensor, in a fraction of the time that ``torch.tensor`` takes."""
    return torch.from_numpy(np.array(values, bool))


def _adapters(rows: Sequence[RequestState | None]) -> list[str | None]:
    return [None if row is None else row.adapter for row in rows]


def _listed(chosen: SampledTokens) -> Iterator[tuple[int, TokenLogprob | None]]:
    """Wait for the sampled tokens; yield them with their log-probabilities."""
    tokens = chosen.listed()
    logprobs = chosen.logprobs(tokens)
    yield from ((token, logprobs.get(place)) for place, token in enumerate(tokens))


def _right_drafts(drafts: torch.Tensor, chosen: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return how many drafts are right, (1,) int64; drafts after an end token are not.

    Args:
        drafts: (drafts,) ids.
        chosen: (1 + drafts,) ids of the model's choices.
        ends: (ends,) ids of end tokens.
    """
    own = chosen[:-1]
    right = (own == drafts) & (own[:, None] != ends).all(1)
    return right.cumprod(0).sum(0, keepdim=True)


def _give(rows: Sequence[RequestState | None], chosen: SampledTokens) -> float:
    """Wait for the sampled tokens and pass each row its token; return the time of ``perf_counter``
    at which they had arrived."""
    tokens = chosen.listed()
    arrived = perf_counter()
    logprobs = chosen.logprobs(tokens)
    for place, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        if row is not None and not row.ended:
            row.next_logprob = logprobs.get(place)
            row.take(token)
    return arrived


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
    """Decode a prompt and yield one token per row at each step, None for ended rows.

    End tokens are left out. At the end, the cache contains prompt and output, except the last token
    of a row that was ended by ``max_new_tokens`` or the caller. Pipelines use ``Engine`` instead,
    whose batch changes between steps.

    Args:
        model: transformers model for generation, with attention "oscar" in its decoder.
        prompt: prompt of one or several rows, padded on the left.
        cache: cache to extend; may contain a past, such as earlier turns.
        sampling: options for all rows, or a sequence with the options of each row.
        end_tokens: ids that end a row.
        ended: (batch,) bool on the CPU; the caller may set it between two steps to end rows.

    Raises:
        FloatingPointError: if the model's logits are NaN.
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
