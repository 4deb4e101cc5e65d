"""Conversations: media with labels, then questions and answers, as one batch of tokens.

All rows of a batch share the layout of the media, so positions are computed once. Questions are
packed row by row.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from examples.train_pocket.configs import Pocket
from examples.train_pocket.forward import clip_tokens
from examples.train_pocket.language import Speller
from examples.train_pocket.questions import Asked, stack
from examples.train_pocket.words import FILLERS

IGNORE = -100


@dataclass(frozen=True)
class Plan:
    """What a conversation shows before the questions; equal plans have equal layouts.

    Attributes:
        images, clips: numbers of media.
        size: height and width of the images, in pixels.
        frames: mel frames of a clip.
        digits: digits of a label; 0 for labels 1, 2, 3, ... in order.
        fillers: seed of the numbers of words after each medium, of a system prompt and of turns
            that begin between media; 0 for none of these.
    """

    images: int
    clips: int
    size: tuple[int, int] = (96, 192)
    frames: int = 180
    digits: int = 0
    fillers: int = 0


@dataclass
class Layout:
    """Tokens before the first question, the same places in every row.

    Attributes:
        ids: (tokens,) token ids with any labels.
        labels: (media, digits) places of the labels' digits.
        fillers: (words,) places of filler words.
        image_places, clip_places: (count,) places of the features.
        positions: (3, tokens) or (tokens,) position ids.
        next_position: position id of the first token after these.
    """

    ids: Tensor
    labels: Tensor
    fillers: Tensor
    image_places: Tensor
    clip_places: Tensor
    positions: Tensor
    next_position: int


@dataclass
class Batch:
    """One step's tokens.

    Attributes:
        ids: (rows, tokens) token ids.
        positions: (3, tokens) or (tokens,) position ids of every row.
        start: number of tokens before the questions.
        targets: (rows, tokens - start) ids to predict, IGNORE where there is no answer.
        asked: (rows, tokens - start) number of the question that a target answers.
        questions: questions in a row.
    """

    ids: Tensor
    positions: Tensor
    start: int
    targets: Tensor
    asked: Tensor
    questions: int


class Writer:
    """Writes conversations in the chat format of one model.

    Args:
        pocket: model (its position rule and ids) and processor (its tokenizer).
        device: device of the batches.
        image_tokens: function from the height and width of an image to its tokens.
    """

    def __init__(
        self, pocket: Pocket, device: torch.device, image_tokens: Callable[[int, int], int]
    ) -> None:
        self.pocket, self.device, self.image_tokens = pocket, device, image_tokens
        self.speller = Speller(pocket.processor.tokenizer, device)
        self.llava = pocket.name == "pocket-llava"
        if self.llava:
            self.open, self.turn, self.end, self.after = "[INST]", "[/INST]", "</s>", ""
            self.image = ("<image>", "", "")
        else:
            self.open, self.turn = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
            self.end, self.after = "<|im_end|>", "\n"
            self.image = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
        self.clip = ("<|audio_pad|>", "<|audio_start|>", "<|audio_end|>")
        self.digits = self.speller.table([*"0123456789"])[:, 0]
        self.words = self.speller.table([f"{word} " for word in FILLERS])[:, 0]
        self._layouts: dict[Plan, Layout] = {}
        self._longest: dict[object, int] = {}

    def layout(self, plan: Plan) -> Layout:
        """The layout of a plan, built once."""
        if plan not in self._layouts:
            self._layouts[plan] = self._build(plan)
        return self._layouts[plan]

    def _build(self, plan: Plan) -> Layout:
        labels, fillers, places = [], [], {"image": [], "clip": []}
        words = random.Random(plan.fillers)
        ids = self.speller.ids("<s>" if self.llava else "")

        def fill(count: int) -> None:
            fillers.extend(range(len(ids), len(ids) + count))
            ids.extend([int(self.words[0])] * count)

        if plan.fillers and words.random() < 0.4:
            before, after = ("", "\n") if self.llava else ("<|im_start|>system\n", "<|im_end|>\n")
            ids += self.speller.ids(before)
            fill(words.randint(3, 9))
            ids += self.speller.ids(after)
        ids += self.speller.ids(self.open)
        image_tokens = self.image_tokens(*plan.size)
        kinds = [("image", "Picture ", self.image, image_tokens)] * plan.images
        kinds += [("clip", "Clip ", self.clip, clip_tokens(plan.frames))] * plan.clips
        numbers = [*range(1, plan.images + 1), *range(1, plan.clips + 1)]
        for (kind, noun, (pad, before, after), count), number in zip(kinds, numbers, strict=True):
            label = f"{10 ** (plan.digits - 1)}" if plan.digits else f"{number}"
            ids += self.speller.ids(noun)
            labels.append(range(len(ids), len(ids) + len(label)))
            ids += self.speller.ids(f"{label}:{before}")
            places[kind] += range(len(ids), len(ids) + count)
            ids += self.speller.ids(pad) * count + self.speller.ids(after)
            if plan.fillers:
                fill(words.randint(0, 3))
                if words.random() < 0.15:
                    # A later turn may bring media too.
                    ids += self.speller.ids(self.turn)
                    fill(words.randint(1, 3))
                    ids += self.speller.ids(self.end + self.after + self.open)
        tokens = torch.tensor(ids)
        positions = self._positions(tokens, plan)
        free = [list(label) for label in labels] if plan.digits else []

        def tensor(numbers: list) -> Tensor:
            return torch.tensor(numbers, dtype=torch.long, device=self.device)

        return Layout(
            ids=tokens.to(self.device),
            labels=tensor(free),
            fillers=tensor(fillers),
            image_places=tensor(places["image"]),
            clip_places=tensor(places["clip"]),
            positions=positions.to(self.device),
            next_position=int(positions.max()) + 1,
        )

    def _positions(self, ids: Tensor, plan: Plan) -> Tensor:
        """Position ids by the model's own rule."""
        if self.llava:
            return torch.arange(len(ids))
        lm, row, mask = self.pocket.generator, ids[None], torch.ones(1, len(ids)).long()
        grid = [[1, plan.size[0] // 16, plan.size[1] // 16]] * plan.images
        grids = torch.tensor(grid) if plan.images else None
        if self.pocket.name == "pocket-vl":
            types = (row == lm.config.image_token_id).int()
            positions, _ = lm.model.get_rope_index(
                row, mm_token_type_ids=types, image_grid_thw=grids, attention_mask=mask
            )
        else:
            frames = torch.tensor([plan.frames] * plan.clips) if plan.clips else None
            positions, _ = lm.get_rope_index(row, grids, None, mask, False, frames)
        return positions[:, 0].long()

    def labels(self, plan: Plan, rows: int) -> tuple[Tensor, Tensor]:
        """Labels of images (rows, images) and of clips (rows, clips), different in each row."""
        numbers = []
        for count in (plan.images, plan.clips):
            if plan.digits:
                low = 10 ** (plan.digits - 1)
                drawn = torch.rand(rows, 9 * low, device=self.device).argsort(-1)
                numbers.append(drawn[:, :count] + low)
            else:
                numbers.append(torch.arange(1, count + 1, device=self.device).expand(rows, -1))
        return numbers[0], numbers[1]

    def write(self, plan: Plan, labels: tuple[Tensor, Tensor], asked: Asked, key: object) -> Batch:
        """Write media with these labels, then all questions in order.

        Args:
            plan: plan of the media.
            labels: labels from ``labels``.
            asked: questions and answers, (rows, asked, tokens).
            key: batches of one key are padded or cut to the length of the first, so that later
                steps need not wait for the device to know their length. None: a batch is as long
                as it needs to be.
        """
        layout, rows = self.layout(plan), len(asked.question)
        prefix = layout.ids.repeat(rows, 1)
        if plan.digits:
            label = torch.cat(labels, 1)[..., None]
            powers = 10 ** torch.arange(plan.digits - 1, -1, -1, device=self.device)
            prefix[:, layout.labels] = self.digits[label // powers % 10]
        if len(layout.fillers):
            drawn = torch.randint(
                0, len(self.words), (rows, len(layout.fillers)), device=self.device
            )
            prefix[:, layout.fillers] = self.words[drawn]
        tail, targets, numbers = self._tail(asked, key)
        length = tail.shape[1]
        after = layout.next_position + torch.arange(length, device=self.device)
        if layout.positions.ndim == 2:
            after = after.expand(3, -1)
        return Batch(
            ids=torch.cat((prefix, tail), 1),
            positions=torch.cat((layout.positions, after), -1),
            start=prefix.shape[1],
            targets=targets,
            asked=numbers,
            questions=asked.question.shape[1],
        )

    def _tail(self, asked: Asked, key: object) -> tuple[Tensor, Tensor, Tensor]:
        """Questions and answers of each row without gaps, their targets and numbers."""
        rows, count, _ = asked.question.shape

        def fixed(text: str) -> Tensor:
            return self.speller.constant(text).expand(rows, count, -1)

        opening = fixed(self.open).clone()
        opening[:, 0] = -1  # the media stand in the first turn
        end = fixed(self.end)
        parts = [opening, asked.question, fixed(self.turn), asked.answer, end, fixed(self.after)]
        learnt = [0, 0, 0, 1, 1, 0]
        tokens = torch.cat(parts, -1)
        wanted = torch.cat(
            [torch.full_like(part, learn) for part, learn in zip(parts, learnt, strict=True)], -1
        )
        number = torch.arange(count, device=self.device)[:, None].expand_as(tokens)
        tokens, wanted, number = (x.reshape(rows, -1) for x in (tokens, wanted, number))
        there = tokens >= 0
        length = self._longest.get(key)
        if length is None:
            length = -(-int(there.sum(-1).max()) // 16) * 16
            if key is not None:
                self._longest[key] = length
        place = torch.where(there, there.long().cumsum(-1) - 1, length).clamp(max=length)
        pad = self.pocket.processor.tokenizer.pad_token_id
        target = torch.where(wanted.bool(), tokens, IGNORE)

        def packed(values: Tensor, fill: int) -> Tensor:
            blank = torch.full((rows, length + 1), fill, device=self.device)
            return blank.scatter(1, place, values)[:, :length]

        return packed(tokens, pad), packed(target, IGNORE), packed(number, 0)


def together(several: list[Asked]) -> Asked:
    """Questions about different media of one conversation, in random order."""
    question = stack([asked.question for asked in several], dim=1)
    answer = stack([asked.answer for asked in several], dim=1)
    order = torch.randperm(question.shape[1], device=question.device)
    return Asked(question[:, order], answer[:, order])
