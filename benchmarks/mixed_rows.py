"""Decode answers to problems with many methods of storing keys and values in one batch.

A model reads each prompt once, in 16 bits. Then every method stores the prompt, and all answers are
decoded together, one token per row and step: rows share the model's products, and each row attends
to keys and values as its method stores them. Our formats of single tokens run on their real pages
(``Pages``). Other methods run on what they restore (``Restored``): a token is replaced, once, when
the method packs it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from oscar_mm.cache.batch_view import BatchView
from oscar_mm.cache.cache import OscarCache, as_argument
from oscar_mm.cache.page_store import PageStore
from oscar_mm.compare.methods import Method
from oscar_mm.compare.paged import Paged
from oscar_mm.compare.rivals import Rival
from oscar_mm.compare.teacher_forcing import (
    ForcedCache,
    LayerStates,
    Pair,
    Recorder,
    as_recorded,
)
from oscar_mm.pages.codecs.registry import codec_of


@dataclass
class Answer:
    """Answer under way.

    Attributes:
        number: number of the problem.
        method: index of the method.
        prompt: tokens of the prompt.
        tokens: ids of the answer so far; the latest is not stored yet.
        restored_from: (prompt and answer,) see ``Method.restored_from``.
    """

    number: int
    method: int
    prompt: int
    restored_from: Tensor
    tokens: list[int] = field(default_factory=list)

    @property
    def stored(self) -> int:
        """Number of stored tokens: all but the latest."""
        return self.prompt + len(self.tokens) - 1

    @property
    def packed(self) -> int:
        """Number of tokens that the latest step read as the method restores them."""
        return int((self.restored_from[: self.stored] < self.stored).sum())


class Rows(ABC):
    """Rows of a batch whose keys and values one method stores.

    Attributes:
        answers: the rows' answers.
    """

    def __init__(self) -> None:
        self.answers: list[Answer] = []

    @abstractmethod
    def add(self, answer: Answer, layers: Sequence[LayerStates]) -> None:
        """Add a row, and store its prompt as the method does.

        Args:
            answer: answer whose first token is known.
            layers: recorded states of the prompt.
        """

    @abstractmethod
    def begin(self) -> None:
        """Begin a step, in which each row gets a token."""

    @abstractmethod
    def attend(
        self,
        index: int,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
    ) -> Tensor:
        """Store the rows' new tokens in a layer and return the output of its attention.

        Args:
            index: index of the layer.
            module: attention module of the layer.
            query: (rows, query heads, 1, head_dim).
            key, value: (rows, KV heads, 1, head_dim).
            scaling: factor that the scores are multiplied by.

        Returns:
            (rows, query heads, 1, head_dim).
        """

    def drop(self, place: int) -> None:
        """Remove a row; the last row takes its place."""
        self.answers[place] = self.answers[-1]
        self.answers.pop()


class Pages(Rows):
    """Rows in real caches, as the engine decodes them.

    Args:
        method: method whose policy the caches have.
    """

    def __init__(self, method: Paged) -> None:
        super().__init__()
        self._method, self._store = method, PageStore(method.policy)
        self._view, self._caches = BatchView(self._store), list[OscarCache]()
        self._changed = False

    def add(self, answer: Answer, layers: Sequence[LayerStates]) -> None:
        """See ``Rows.add``."""
        cache = OscarCache(self._method.policy, store=self._store)
        cache.sigmas = {states.index: self._method.sigma(states) for states in layers}
        cache.attend_packed(None)
        for states in layers:
            cache.update(states.keys, states.values, states.index)
            cache.layers[states.index].append(states.keys, states.values, cache.step)
        cache.check_complete()
        self.answers.append(answer)
        self._caches.append(cache)
        self._changed = True

    def begin(self) -> None:
        """See ``Rows.begin``."""
        if self._changed:
            self._view.set_rows(self._caches)
            self._changed = False
        self._view.attend_packed(None)

    def attend(
        self,
        index: int,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
    ) -> Tensor:
        """See ``Rows.attend``."""
        keys, values = self._view.update(key, value, index)
        chunk: Any = keys.oscar_chunk  # pyright: ignore[reportAttributeAccessIssue]
        return chunk.attend(module, query, keys, values, scaling, None)

    def drop(self, place: int) -> None:
        """See ``Rows.drop``."""
        super().drop(place)
        self._caches[place].close()
        self._caches[place] = self._caches[-1]
        self._caches.pop()
        self._changed = True


class Restored(Rows):
    """Rows in tensors that hold each token as it is read: in 16 bits, or as restored.

    Args:
        method: method that packs each token once, alone or in a tile.
        rows: maximum number of rows.
        room: maximum number of tokens per row.
    """

    def __init__(self, method: Method, rows: int, room: int) -> None:
        super().__init__()
        self.method, self._rows, self._room = method, rows, room
        self._layers: list[LayerStates] = []
        self._sides: list[Pair] = []
        self._lengths = torch.zeros(rows, dtype=torch.long)
        self._new: list[tuple[Tensor, Tensor]] = []
        """Rows, and their tokens, that this step reads in restored form for the first time."""

    def add(self, answer: Answer, layers: Sequence[LayerStates]) -> None:
        """See ``Rows.add``."""
        if not self._layers:
            self._layers = [
                replace(x, keys=x.keys[..., :0, :], values=x.values[..., :0, :]) for x in layers
            ]
            _, heads, _, width = layers[0].keys.shape
            shape = (self._rows, heads, self._room, width)
            self._sides = [(x.keys.new_zeros(shape), x.keys.new_zeros(shape)) for x in layers]
        row, ids = len(self.answers), torch.zeros(answer.prompt, dtype=torch.int8)
        for states, sides in zip(layers, self._sides, strict=True):
            back = self.method.restored(states, ids)
            for side, stored in zip(sides, (back.keys, back.values), strict=True):
                side[row, :, : answer.prompt] = stored[0]
        self.answers.append(answer)

    def begin(self) -> None:
        """See ``Rows.begin``."""
        count = len(self.answers)
        self._lengths[:count] = torch.tensor([answer.stored for answer in self.answers])
        found: dict[int, tuple[list[int], list[Tensor]]] = {}
        for row, answer in enumerate(self.answers):
            # What is packed at the end of the prompt was restored with it.
            first = answer.prompt if answer.stored == answer.prompt else 0
            now = answer.restored_from[first : answer.stored + 1] == answer.stored
            if len(tokens := now.nonzero()[:, 0] + first):
                rows, places = found.setdefault(len(tokens), ([], []))
                rows.append(row)
                places.append(tokens)
        self._new = [(torch.tensor(rows), torch.stack(at)) for rows, at in found.values()]

    def attend(
        self,
        index: int,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
    ) -> Tensor:
        """See ``Rows.attend``."""
        count = len(self.answers)
        lengths, every = self._lengths[:count], torch.arange(count)
        for side, new in zip(self._sides[index], (key, value), strict=True):
            side[every, :, lengths] = new[:, :, 0].to(side.dtype)
        for rows, tokens in self._new:
            self._restore(index, rows, tokens)
        longest = int(lengths.max()) + 1
        keys, values = (side[:count, :, :longest].to(query.dtype) for side in self._sides[index])
        visible = (torch.arange(longest) <= lengths[:, None])[:, None, None]
        # The queries of a group of heads attend to the same keys, like several tokens.
        grouped = query.view(count, keys.shape[1], -1, query.shape[-1])
        output = scaled_dot_product_attention(grouped, keys, values, visible, scale=scaling)
        return output.view(query.shape)

    def _restore(self, index: int, rows: Tensor, tokens: Tensor) -> None:
        """Replace tokens of a layer, (rows, tokens) indices, by what the method restores."""
        method, states, sides = self.method, self._layers[index], self._sides[index]
        if isinstance(method, Rival):
            if method.exact.spares(states):
                return
            form = method.format
            for side, restore in zip(sides, (form.keys, form.values), strict=True):
                given = side[rows[:, None], :, tokens].transpose(1, 2)
                back = restore(given.float()).to(side.dtype)
                side[rows[:, None], :, tokens] = back.transpose(1, 2)
            return
        for row, places in zip(rows.tolist(), tokens, strict=True):
            stored = self.answers[row].stored
            keys, values = (side[row : row + 1, :, :stored] for side in sides)
            ids = torch.zeros(stored, dtype=torch.int8)
            back = method.restored(replace(states, keys=keys, values=values), ids)
            for side, found in zip(sides, (back.keys, back.values), strict=True):
                side[row, :, places] = found[0, :, places]

    def drop(self, place: int) -> None:
        """See ``Rows.drop``."""
        last = len(self.answers) - 1
        super().drop(place)
        if place != last:
            for sides in self._sides:
                for side in sides:
                    side[place] = side[last]


class MixedCache(ForcedCache):
    """Cache of a decode step whose rows are those of several ``Rows``, one after the other.

    Args:
        parts: the rows.
    """

    def __init__(self, parts: Sequence[Rows]) -> None:
        super().__init__()
        self.parts = [part for part in parts if part.answers]
        for part in self.parts:
            part.begin()

    def attention_of(self, index: int) -> Any:
        """See ``ForcedCache.attention_of``."""
        return _Attention(self, index)


class _Attention:
    """Attention of one layer, called by attention "oscar"."""

    def __init__(self, cache: MixedCache, index: int) -> None:
        self._parts, self._index = cache.parts, index

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        visible: Tensor | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return the output, (rows, query heads, 1, head_dim)."""
        sizes = [len(part.answers) for part in self._parts]
        of_parts = zip(self._parts, *(x.split(sizes) for x in (query, key, value)), strict=True)
        outputs = [part.attend(self._index, module, *states, scaling) for part, *states in of_parts]
        return torch.cat(outputs)


def rows_of(method: Method, rows: int, room: int) -> Rows:
    """Return empty rows for a method; arguments as in ``Restored``."""
    if isinstance(method, Paged) and codec_of(method.policy).appends_tokens:
        return Pages(method)
    return Restored(method, rows, room)


class Reader:
    """Reads prompts in 16 bits; what all prompts begin with is read once.

    Args:
        model: language model with attention "oscar".
        beginning: (tokens,) ids of the common beginning.
    """

    def __init__(self, model: Any, beginning: Tensor) -> None:
        self._model, self._count = model, len(beginning)
        recorder = Recorder(model)
        model(beginning[None], **as_argument(recorder.cache), logits_to_keep=1)
        self._layers = recorder.layers

    def read(self, ids: Tensor) -> tuple[list[LayerStates], Tensor]:
        """Read a prompt that starts with the common beginning and is longer.

        Returns:
            States of the whole prompt in each layer, and the logits after it, (vocabulary,).
        """
        found: list[LayerStates] = []

        def keep(index: int, _: nn.Module, queries: Tensor, *sides: Any) -> None:
            old, pair = self._layers[index], sides[:2]
            keys, values = (
                torch.cat([past, new.to(past.dtype)], 2)
                for past, new in zip((old.keys, old.values), pair, strict=True)
            )
            found.append(replace(old, keys=keys, values=values, first_queries=queries))

        cache = ForcedCache(as_recorded(self._layers), self._count, keep)
        places = torch.arange(self._count, len(ids))[None]
        output = self._model(
            ids[None, self._count :], position_ids=places, **as_argument(cache), logits_to_keep=1
        )
        return found, output.logits[0, -1]


@torch.inference_mode()
def decode(
    model: Any,
    prompts: Sequence[Tensor],
    methods: Sequence[Method],
    ended: Callable[[list[int]], bool],
    *,
    most: int,
    rows: int,
    more: Callable[[], bool] = lambda: True,
) -> Iterator[tuple[int, list[LayerStates], list[Answer]]]:
    """Answer prompts greedily with each method.

    Args:
        model: language model with attention "oscar", on the CPU.
        prompts: token ids of each prompt.
        methods: methods of storing keys and values.
        ended: function that returns whether an answer with these tokens is complete.
        most: maximum number of tokens of an answer.
        rows: maximum number of answers that are decoded together; at least one of each method.
        more: function that returns whether to begin with another prompt.

    Yields:
        For each prompt, in the order in which its answers are complete: its number, the states of
        its tokens, and its answers by method.
    """
    same = min(map(len, prompts)) - 1
    while len({tuple(ids[:same].tolist()) for ids in prompts}) > 1:
        same -= 1
    reader = Reader(model, prompts[0][:same])
    together, room = max(1, rows // len(methods)), max(map(len, prompts)) + most
    parts = [rows_of(method, together, room) for method in methods]
    read: dict[int, list[LayerStates]] = {}
    complete: dict[int, list[Answer]] = {}
    waiting = list(range(len(prompts)))
    while True:
        while waiting and max(len(part.answers) for part in parts) < together and more():
            number = waiting.pop(0)
            layers, logits = reader.read(prompts[number])
            read[number], complete[number] = layers, []
            size = len(prompts[number])
            text = torch.zeros(size + most, dtype=torch.int8)
            for index, (part, method) in enumerate(zip(parts, methods, strict=True)):
                restored_from = method.restored_from(text, size)
                part.add(Answer(number, index, size, restored_from, [int(logits.argmax())]), layers)
        answers = [answer for part in parts for answer in part.answers]
        if not answers:
            return
        output = model(
            torch.tensor([[answer.tokens[-1]] for answer in answers]),
            position_ids=torch.tensor([[answer.stored] for answer in answers]),
            **as_argument(MixedCache(parts)),
        )
        chosen = output.logits[:, -1].argmax(-1).tolist()
        for answer, token in zip(answers, chosen, strict=True):
            answer.tokens.append(token)
        for part in parts:
            for place in reversed(range(len(part.answers))):
                answer = part.answers[place]
                if len(answer.tokens) < most and not ended(answer.tokens):
                    continue
                part.drop(place)
                complete[answer.number].append(answer)
                if len(complete[answer.number]) == len(methods):
                    found = sorted(complete.pop(answer.number), key=lambda x: x.method)
                    yield answer.number, read.pop(answer.number), found
