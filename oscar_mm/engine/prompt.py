"""Prompt: model inputs, positions and modalities of a prompt, and functions that split it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import Cache

from oscar_mm.cache.cache import as_argument
from oscar_mm.engine.input_layout import InputLayout, rows_of
from oscar_mm.media.encoder_inputs import SAMPLES
from oscar_mm.modality import MediumSpan, Modality, Span, spans_of
from oscar_mm.ops.decode_tables import moved


@dataclass(frozen=True)
class Prompt:
    """Input of a model before it answers.

    Attributes:
        inputs: arguments of the model's forward, without positions: input_ids (batch, tokens),
            pixel values, grids, attention_mask if there is padding (on the left), ... All are
            tensors, except the samples of recordings, which are a list of tensors. All may stay on
            the CPU until the model uses them, see ``arguments``; the host can read ids on the CPU
            without waiting for a GPU.
        positions: (axes, batch, tokens) or (batch, tokens) position ids, on the device of the
            model's inputs; on the CPU when built by a family, see ``to``.
        next_position: (batch,) RoPE position of the first new token, usually on the CPU.
        modalities: (batch, tokens) int8 on the CPU, -1 for padding.
        media: images, videos and recordings of a single row, in order.
        salt: prefix-cache salt; prompts with different salts share no prefix.
        adapter: name of the adapter that reads the prompt and answers; None for the model alone.
            Prompts with different adapters share no prefix.
        continues: whether the answer continues the prompt's text, so that its first token is text
            and not reasoning.
        layout: how ``inputs`` are cut, as defined by the family.
        marks: numbers of tokens after which prefill calls ``OscarCache.mark``, in ascending order;
            each ends a pass. Only for models whose layers keep states.
    """

    inputs: dict[str, Any]
    positions: torch.Tensor
    next_position: torch.Tensor
    modalities: torch.Tensor
    media: tuple[MediumSpan, ...] = ()
    salt: str = ""
    adapter: str | None = None
    continues: bool = False
    layout: InputLayout = field(default_factory=InputLayout)
    marks: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Number of tokens per row, including padding."""
        return self.modalities.shape[1]

    @property
    def ids(self) -> torch.Tensor:
        """(batch, tokens) token ids on the device of the model's inputs."""
        return moved(self.inputs["input_ids"], self.positions.device)

    def arguments(self) -> dict[str, Any]:
        """Return ``inputs`` on the device of the model's inputs; samples stay where they are.

        Indices of ``InputLayout.places`` count from the first row of all media.
        """
        device = self.positions.device
        inputs = self.inputs | {"input_ids": self.ids}
        for name in self.layout.places.keys() & inputs.keys():
            inputs[name] = _from_first(self, name)
        return {
            name: value if name == SAMPLES else value.to(device) for name, value in inputs.items()
        }

    def to(self, device: torch.device) -> Prompt:
        """Return the prompt with its positions on another device, where ``ids`` and ``arguments``
        then return tensors."""
        return replace(self, positions=moved(self.positions, device))

    def positions_after(self, count: int) -> torch.Tensor:
        """Return the position ids of the next ``count`` text tokens, with the leading shape and
        dtype of ``positions``."""
        steps = torch.arange(count, device=self.positions.device)
        following = self.next_position.to(steps.device) + steps
        following = following.expand(*self.positions.shape[:-1], -1)
        if following.ndim == 3:
            # The first axis counts tokens; in the others, media span fewer positions than tokens.
            row = self.positions[:1, :, -1:] + 1 + steps
            following = torch.cat([row, following[1:]])
        return following.to(self.positions.dtype)

    @property
    def spans(self) -> list[list[Span]]:
        """Runs of consecutive tokens of the same modality, by row."""
        return [spans_of(row) for row in self.modalities.tolist()]


def _from_first(prompt: Prompt, name: str) -> torch.Tensor:
    """Return an argument of ``InputLayout.places`` whose indices count from the first row of all
    media, not of each."""
    layout, inputs = prompt.layout, prompt.inputs
    places, of = inputs[name], layout.places[name]
    rows = rows_of(inputs[layout.per_patch[of][1]])
    before = (rows.cumsum(0) - rows) * inputs[of].shape[1]
    before = before.repeat_interleave(rows_of(inputs[layout.per_patch[name][1]]))
    return torch.where(places < 0, places, places + before[:, None])


def forward(model: Any, prompt: Prompt, cache: Cache) -> torch.Tensor:
    """Run the forward pass of a model over an entire prompt.

    Returns:
        (batch, vocabulary) logits of the last token.
    """
    output = model(
        **prompt.arguments(),
        position_ids=prompt.positions,
        **as_argument(cache),
        use_cache=True,
        logits_to_keep=1,
    )
    return output.logits[:, -1]


def beginning(prompt: Prompt, tokens: int) -> Prompt:
    """Return the first tokens of a single-row prompt with their media; see ``remaining``."""
    return part_of(prompt, 0, tokens)


def remaining(prompt: Prompt, tokens: int) -> Prompt:
    """Return a single-row prompt without its first tokens and their media.

    Args:
        prompt: prompt built by a family.
        tokens: number of tokens to drop; must leave a token and not split a media item.
    """
    return part_of(prompt, tokens, prompt.tokens)


def text_after(prompt: Prompt, ids: torch.Tensor) -> Prompt:
    """Return a prompt of text that follows a single-row prompt.

    Args:
        prompt: the prompt before the text.
        ids: (1, tokens) int64 token ids, on any device.
    """
    count = ids.shape[1]
    return Prompt(
        inputs={"input_ids": ids.to(prompt.inputs["input_ids"].device)},
        positions=prompt.positions_after(count),
        next_position=prompt.next_position + count,
        modalities=torch.full((1, count), int(Modality.TEXT), dtype=torch.int8),
        adapter=prompt.adapter,
    )


def up_to_marks(prompt: Prompt) -> Iterator[Prompt]:
    """Yield the parts of a single-row prompt that end at its marks, and the rest."""
    start = 0
    for stop in (*prompt.marks, prompt.tokens):
        if stop > start:
            yield prompt if (start, stop) == (0, prompt.tokens) else part_of(prompt, start, stop)
            start = stop


def segments(prompt: Prompt, max_tokens: int) -> Iterator[Prompt]:
    """Yield consecutive parts of a prompt, without splitting media.

    Args:
        prompt: prompt built by a family; not split if it has several rows, or media that are not
            listed in ``media``.
        max_tokens: maximum number of tokens per part; a longer media item becomes its own part.
    """
    shows = bool((prompt.modalities > Modality.TEXT).any())
    if len(prompt.modalities) > 1 or "attention_mask" in prompt.inputs or shows > len(prompt.media):
        yield prompt
        return
    start = 0
    while start < prompt.tokens:
        stop = min(start + max_tokens, prompt.tokens)
        for span in prompt.media:
            if span.start < stop < span.stop:
                stop = span.start if span.start > start else span.stop
        yield part_of(prompt, start, stop)
        start = stop


def by_frames(prompt: Prompt, max_tokens: int) -> Prompt:
    """Split each video of more than ``max_tokens`` tokens into several shorter videos.

    The tower computes the same features, see ``InputLayout.video_grids`` and ``frames_as_images``.
    Videos with audio stay whole, and so do the videos of a prompt without ``media``.
    """
    layout = prompt.layout
    if layout.frames_as_images:
        parts = [part for span in prompt.media for part in _frame_runs(prompt, span, max_tokens)]
        return replace(prompt, media=tuple(parts))
    if layout.video_grids not in prompt.inputs or not prompt.media:
        return prompt
    grids = prompt.inputs[layout.video_grids]
    sizes, numbers = [], []
    media: list[MediumSpan] = []
    for span in prompt.media:
        if span.modality is not Modality.VIDEO:
            media.append(span)
            continue
        number = numbers[-1] + 1 if numbers else 0
        frames, down, across = grids[number].tolist()
        kinds = prompt.modalities[0, span.start : span.stop]
        places = (kinds == Modality.VIDEO).nonzero()[:, 0] + span.start
        heard = bool((kinds == Modality.AUDIO).any())
        step = frames if heard else max(1, max_tokens * frames // len(kinds))
        for first in range(0, frames, step):
            last = min(first + step, frames)
            sizes.append((last - first, down, across))
            numbers.append(number)
            shown = places[len(places) * first // frames : len(places) * last // frames]
            start, stop = int(shown[0]), int(shown[-1]) + 1
            media.append(span if step >= frames else replace(span, start=start, stop=stop))
    inputs = {
        name: value[torch.tensor(numbers, device=value.device)]
        if layout.per_medium.get(name) is Modality.VIDEO
        else value
        for name, value in prompt.inputs.items()
    } | {layout.video_grids: grids.new_tensor(sizes)}
    return replace(prompt, inputs=inputs, media=tuple(media))


def _frame_runs(prompt: Prompt, span: MediumSpan, max_tokens: int) -> Iterator[MediumSpan]:
    """Split the span of a video at its frames, into parts of at most ``max_tokens`` tokens if its
    frames are that short."""
    start = stop = span.start
    for frame in _items(prompt, span) if span.modality is Modality.VIDEO else ():
        if stop > start and frame.stop - start > max_tokens:
            yield replace(span, start=start, stop=stop)
            start = frame.start
        stop = frame.stop
    yield replace(span, start=start, stop=span.stop)


def _items(prompt: Prompt, span: MediumSpan) -> list[Span]:
    """Return what has rows of its own in the model's arguments: a media item, or its frames."""
    if not prompt.layout.frames_as_images:
        return [Span(span.modality, span.start, span.tokens)]
    return [
        Span(Modality.IMAGE, span.start + run.start, run.length)
        for run in spans_of(prompt.modalities[0, span.start : span.stop].tolist())
        if run.modality is not Modality.TEXT
    ]


def part_of(prompt: Prompt, start: int, stop: int) -> Prompt:
    """Return tokens ``start`` to ``stop - 1`` of a single-row prompt with their media.

    Args:
        prompt: prompt built by a family.
        start, stop: must not split a media item.
    """
    if any(span.start < cut < span.stop for span in prompt.media for cut in (start, stop)):
        raise ValueError(f"tokens {start} to {stop} begin or end within a media item")
    if not 0 <= start < stop <= prompt.tokens:
        raise ValueError(f"tokens {start} to {stop} are out of range: there are {prompt.tokens}")
    before = _counted(prompt, [span for span in prompt.media if span.stop <= start])
    shown = [span for span in prompt.media if start <= span.start and span.stop <= stop]
    inputs = _taken(prompt, before, _counted(prompt, shown))
    inputs["input_ids"] = inputs["input_ids"][:, start:stop]
    following = prompt.next_position
    if stop < prompt.tokens:
        following = prompt.positions[..., stop].reshape(-1)[-1:].to(following.dtype)
    return Prompt(
        inputs=inputs,
        positions=prompt.positions[..., start:stop],
        next_position=following,
        modalities=prompt.modalities[:, start:stop],
        media=tuple(span.shifted(-start) for span in shown),
        adapter=prompt.adapter,
        layout=prompt.layout,
        marks=tuple(mark - start for mark in prompt.marks if start < mark <= stop),
    )


def _counted(prompt: Prompt, spans: list[MediumSpan]) -> dict[Modality, int]:
    """Count the media of each modality; the audio track of a video counts separately."""
    modalities = prompt.modalities[0]
    items = [item.modality for span in spans for item in _items(prompt, span)]
    counts = {kind: items.count(kind) for kind in Modality}
    counts[Modality.AUDIO] += sum(
        span.modality is Modality.VIDEO
        and bool((modalities[span.start : span.stop] == Modality.AUDIO).any())
        for span in spans
    )
    return counts


def _tiles(prompt: Prompt, kind: Modality, tiles: int) -> torch.Tensor:
    """Return the number of tiles of each item of a modality, from its number of tokens."""
    items = [item for span in prompt.media for item in _items(prompt, span)]
    shown = prompt.modalities[0] != Modality.TEXT
    tokens = torch.stack([shown[x.start : x.stop].sum() for x in items if x.modality is kind])
    return tokens * tiles // tokens.sum()


def _taken(
    prompt: Prompt, before: dict[Modality, int], counts: dict[Modality, int]
) -> dict[str, Any]:
    """Select the inputs of ``counts`` media of each modality, after skipping ``before`` media."""
    layout, taken = prompt.layout, {}
    for name, tensor in prompt.inputs.items():
        if name == "input_ids":
            taken[name] = tensor
            continue
        if name in layout.per_medium:
            kind, rows = layout.per_medium[name], None
        elif name in layout.per_patch:
            kind, grids = layout.per_patch[name]
            rows = rows_of(prompt.inputs[grids]).cpu()
        elif name in layout.per_tile:
            kind = layout.per_tile[name]
            rows = _tiles(prompt, kind, len(tensor))
        else:
            raise NotImplementedError(
                "cannot reuse the cached beginning of a prompt: the media in the model's argument "
                f"{name} cannot be split"
            )
        first, last = before[kind], before[kind] + counts[kind]
        if first == last:
            continue
        if rows is not None:
            first, last = int(rows[:first].sum()), int(rows[:last].sum())
        taken[name] = tensor[first:last]
    # The masks are read before any of them is cut.
    masks = {*layout.padded.values()} & taken.keys()
    longest = {mask: int(taken[mask].sum(-1).max()) for mask in masks}
    for name in layout.padded.keys() & taken.keys():
        taken[name] = taken[name][..., : longest[layout.padded[name]]]
    return taken
