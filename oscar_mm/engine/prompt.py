"""Prompt: what a model reads before it answers, and its parts: head, remainder, segments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import Cache

from oscar_mm.cache.cache import as_argument
from oscar_mm.media.encoder_inputs import SAMPLES
from oscar_mm.modality import MediumSpan, Modality, Span, spans_of


@dataclass(frozen=True)
class Prompt:
    """What a model reads before it answers.

    Attributes:
        inputs: arguments of the model's forward: input_ids (batch, tokens), pixel values, grids,
            attention_mask if there is padding (on the left), ...; no positions. Tensors, but
            samples of recordings are a list of them. Pixels, samples and features may wait on the
            CPU until they are read, see ``arguments``.
        positions: (rows, batch, tokens) or (batch, tokens) position ids of the prompt, on the
            device where the model reads; of a family on the CPU, see ``to``.
        next_position: (batch,) RoPE position of the first new token.
        modalities: (batch, tokens) int8 on the CPU, -1 for padding.
        media: the images, videos and recordings of a single row, in its order.
        salt: prompts with another one share no beginning in the prefix cache.
        continues: whether the answer continues the prompt's text, and so is text from its first
            character on, without reasoning.
    """

    inputs: dict[str, Any]
    positions: torch.Tensor
    next_position: torch.Tensor
    modalities: torch.Tensor
    media: tuple[MediumSpan, ...] = ()
    salt: str = ""
    continues: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a row, padding included."""
        return self.modalities.shape[1]

    def arguments(self) -> dict[str, Any]:
        """``inputs``, on the device where the model reads; samples stay where they are."""
        device = self.positions.device
        return {
            name: value if name == SAMPLES else value.to(device)
            for name, value in self.inputs.items()
        }

    def to(self, device: torch.device) -> Prompt:
        """The prompt with ids and positions on the device where the model reads."""
        inputs = self.inputs | {"input_ids": self.inputs["input_ids"].to(device)}
        positions, following = self.positions.to(device), self.next_position.to(device)
        return replace(self, inputs=inputs, positions=positions, next_position=following)

    def positions_after(self, count: int) -> torch.Tensor:
        """Position ids of so many text tokens that follow, shaped and typed as ``positions``."""
        steps = torch.arange(count, device=self.positions.device)
        following = (self.next_position + steps).expand(*self.positions.shape[:-1], -1)
        if following.ndim == 3:
            # The first row counts tokens; media take fewer positions than tokens in the others.
            row = self.positions[:1, :, -1:] + 1 + steps
            following = torch.cat([row, following[1:]])
        return following.to(self.positions.dtype)

    @property
    def spans(self) -> list[list[Span]]:
        """Runs of tokens of one modality, for each row."""
        return [spans_of(row) for row in self.modalities.tolist()]


def forward(model: Any, prompt: Prompt, cache: Cache) -> torch.Tensor:
    """The forward pass of a model over a prompt as a whole.

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
    """The first tokens of a prompt of one row, with the media in them; see ``remaining``."""
    return _part(prompt, 0, tokens)


def remaining(prompt: Prompt, tokens: int) -> Prompt:
    """A prompt of one row without its first tokens, and without the media in them.

    Args:
        prompt: as a family made it.
        tokens: fewer than it has, and not in the middle of a medium.
    """
    return _part(prompt, tokens, prompt.tokens)


def text_after(prompt: Prompt, ids: torch.Tensor) -> Prompt:
    """Text that follows a prompt of one row, as a prompt of its own.

    Args:
        prompt: that the text follows.
        ids: (1, tokens) int64 token ids, on any device.
    """
    count = ids.shape[1]
    return Prompt(
        inputs={"input_ids": ids.to(prompt.positions.device)},
        positions=prompt.positions_after(count),
        next_position=prompt.next_position + count,
        modalities=torch.full((1, count), int(Modality.TEXT), dtype=torch.int8),
    )


def segments(prompt: Prompt, most: int) -> Iterator[Prompt]:
    """A prompt in parts that follow each other, with whole media each.

    Args:
        prompt: as a family made it; a prompt of several rows, or one whose media are not listed,
            stays whole.
        most: tokens of a part; a medium that is longer is a part by itself.
    """
    shows = bool((prompt.modalities > Modality.TEXT).any())
    if len(prompt.modalities) > 1 or "attention_mask" in prompt.inputs or shows > len(prompt.media):
        yield prompt
        return
    start = 0
    while start < prompt.tokens:
        stop = min(start + most, prompt.tokens)
        for span in prompt.media:
            if span.start < stop < span.stop:
                stop = span.start if span.start > start else span.stop
        yield _part(prompt, start, stop)
        start = stop


def by_frames(prompt: Prompt, most: int) -> Prompt:
    """A prompt with each video of more than ``most`` tokens as several shorter ones.

    Qwen's towers give the same features: a patch sees its own pair of frames only. Videos with
    sound stay whole, and so do videos of a prompt without ``media``.
    """
    grids = prompt.inputs.get("video_grid_thw")
    if grids is None or not prompt.media:
        return prompt
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
        step = frames if heard else max(1, most * frames // len(kinds))
        for first in range(0, frames, step):
            last = min(first + step, frames)
            sizes.append((last - first, down, across))
            numbers.append(number)
            shown = places[len(places) * first // frames : len(places) * last // frames]
            start, stop = int(shown[0]), int(shown[-1]) + 1
            media.append(span if step >= frames else replace(span, start=start, stop=stop))
    inputs = prompt.inputs | {"video_grid_thw": grids.new_tensor(sizes)}
    if (seconds := inputs.get("video_second_per_grid")) is not None:
        inputs["video_second_per_grid"] = seconds[torch.tensor(numbers, device=seconds.device)]
    return replace(prompt, inputs=inputs, media=tuple(media))


def _part(prompt: Prompt, start: int, stop: int) -> Prompt:
    if any(span.start < cut < span.stop for span in prompt.media for cut in (start, stop)):
        raise ValueError(f"tokens {start} to {stop} begin or end within a medium")
    if not 0 <= start < stop <= prompt.tokens:
        raise ValueError(f"there are no tokens {start} to {stop} of {prompt.tokens}")
    before = _counted(prompt, [span for span in prompt.media if span.stop <= start])
    shown = [span for span in prompt.media if start <= span.start and span.stop <= stop]
    inputs = _taken(dict(prompt.inputs), before, _counted(prompt, shown))
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
    )


def _counted(prompt: Prompt, spans: list[MediumSpan]) -> dict[Modality, int]:
    """How many media of each kind there are; the sound of a video counts by itself."""
    modalities = prompt.modalities[0]
    counts = {kind: sum(span.modality is kind for span in spans) for kind in Modality}
    counts[Modality.AUDIO] += sum(
        span.modality is Modality.VIDEO
        and bool((modalities[span.start : span.stop] == Modality.AUDIO).any())
        for span in spans
    )
    return counts


_PER_MEDIUM = {
    "image_sizes": Modality.IMAGE,
    "image_grid_thw": Modality.IMAGE,
    "video_grid_thw": Modality.VIDEO,
    "video_second_per_grid": Modality.VIDEO,
    "input_features": Modality.AUDIO,
    "feature_attention_mask": Modality.AUDIO,
    SAMPLES: Modality.AUDIO,
}
"""Arguments of the model's forward with one row for each medium, or sound of a video."""
_PER_PATCH = {
    "pixel_values": (Modality.IMAGE, "image_grid_thw"),
    "pixel_values_videos": (Modality.VIDEO, "video_grid_thw"),
}
"""Arguments with one row for each patch, and the grids that count them; without grids, one row for
each medium."""


def _taken(
    inputs: dict[str, Any], before: dict[Modality, int], counts: dict[Modality, int]
) -> dict[str, Any]:
    """Inputs with ``counts`` media of each kind after the first ``before`` ones."""
    taken = {}
    for name, tensor in inputs.items():
        if name == "input_ids":
            taken[name] = tensor
            continue
        if name in _PER_MEDIUM:
            kind, rows = _PER_MEDIUM[name], None
        elif name in _PER_PATCH:
            kind, grids = _PER_PATCH[name]
            rows = inputs[grids].prod(-1).cpu() if grids in inputs else None
        else:
            raise NotImplementedError(f"{name}: media cannot be taken out of this argument")
        first, last = before[kind], before[kind] + counts[kind]
        if first == last:
            continue
        if rows is not None:
            first, last = int(rows[:first].sum()), int(rows[:last].sum())
        taken[name] = tensor[first:last]
    if "feature_attention_mask" in taken:
        # Padded to the longest sound of those that are left.
        frames = int(taken["feature_attention_mask"].sum(-1).max())
        for name in ("input_features", "feature_attention_mask"):
            taken[name] = taken[name][..., :frames]
    return taken
