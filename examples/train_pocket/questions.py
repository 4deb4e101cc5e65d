"""Questions and answers as token tensors, made for thousands of conversations at once.

All texts are (rows, asked, tokens) int64 with -1 where there is no token: texts of unequal length
are stacked first and moved together at the very end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from examples.train_pocket.clips import Speech
from examples.train_pocket.glyphs import EMPTY
from examples.train_pocket.language import QUESTIONS, Speller, pieces
from examples.train_pocket.pages import SHAPE_COLUMNS, Codes, Receipts, Shapes
from examples.train_pocket.words import COLOURS, GLYPHS, ITEMS, PLACES, SHAPES, SPOKEN

NUMBERS = 1000


@dataclass
class Asked:
    """Questions and their answers, each (rows, asked, tokens) int64."""

    question: Tensor
    answer: Tensor


def stack(parts: list[Tensor], dim: int) -> Tensor:
    """Concatenate (rows, asked, tokens) tensors along ``dim``, filled up to one length."""
    longest = max(part.shape[-1] for part in parts)
    fill = torch.nn.functional.pad
    return torch.cat([fill(part, (0, longest - part.shape[-1]), value=-1) for part in parts], dim)


def choose(ways: list[Tensor], which: Tensor) -> Tensor:
    """Choose among texts (rows, asked, tokens) by the numbers ``which`` (rows, asked)."""
    texts = stack([way[:, :, None] for way in ways], dim=2)
    index = which[..., None, None].expand(-1, -1, 1, texts.shape[-1])
    return texts.gather(2, index)[:, :, 0]


def pick(facts: Tensor, index: Tensor) -> Tensor:
    """Facts (rows, media, ...) at ``index`` (rows, asked)."""
    shape = index.shape + (1,) * (facts.ndim - 2)
    return facts.gather(1, index.view(shape).expand(*index.shape, *facts.shape[2:]))


class Asker:
    """Asks about facts.

    Args:
        speller: tokenizer and device.
        plain: use only the first way of asking each question, as the evaluation does.
    """

    def __init__(self, speller: Speller, plain: bool = False) -> None:
        self.speller, self.device, self.plain = speller, speller.device, plain
        self.numbers = speller.numbers(NUMBERS)
        table = speller.table
        self.letters = torch.cat((table([*GLYPHS])[:, 0], torch.full((9,), -1, device=self.device)))
        self.items, self.spoken, self.places = table(ITEMS), table(SPOKEN), table(PLACES)
        self.shape, self.shapes = (table([f"{s}{end}" for s in SHAPES]) for end in (" ", "s "))
        self.colour = table([f"{colour} " for colour in COLOURS])
        self.newline = speller.ids("\n")[0]

    def ask(self, name: str, **fields: Tensor) -> Tensor:
        """Text of a question with its fields (rows, asked, tokens) filled in."""
        rows, asked = next(iter(fields.values())).shape[:2]
        ways = QUESTIONS[name][:1] if self.plain else QUESTIONS[name]
        texts = []
        for way in ways:
            parts = []
            for place, piece in enumerate(pieces(way)):
                if place % 2:
                    parts.append(fields[piece.strip()])
                elif piece:
                    parts.append(self.speller.constant(piece).expand(rows, asked, -1))
            texts.append(torch.cat(parts, -1))
        which = torch.randint(0, len(ways), (rows, asked), device=self.device)
        return choose(texts, which)

    def said(self, facts: Codes | Speech, rows: int) -> Tensor:
        """Text that each picture shows or each clip says: (rows, media, tokens)."""
        if isinstance(facts, Codes):
            glyphs = torch.where(facts.glyphs == EMPTY, -1, facts.glyphs)
            tokens = self.letters[glyphs]
        else:
            digits = self.letters[facts.digits]
            word = torch.where(facts.words[:, None] < 0, -1, self.spoken[facts.words])
            tokens = torch.cat((digits, word), -1)
        return tokens.view(rows, -1, tokens.shape[-1])

    def texts(
        self, facts: Codes | Speech, labels: Tensor, asked: int, kinds: tuple[int, int, int]
    ) -> Asked:
        """Questions that read one, find one or read three, with weights ``kinds``."""
        voice = isinstance(facts, Speech)
        contents = self.said(facts, len(labels))
        rows, media = labels.shape
        index = self._each(media, rows, asked)
        label, code = self.numbers[pick(labels, index)], pick(contents, index)
        name = "hear" if voice else "read"
        if media == 1:
            return Asked(self.ask(f"{name}_only", label=label), code)
        questions, answers = [self.ask(name, label=label)], [code]
        if voice:
            word = pick(facts.words.view(rows, media), index) >= 0
            questions[0] = choose([questions[0], self.ask("hear_word", label=label)], word.long())
        find = self.ask("hear_find" if voice else "find", code=code)
        questions.append(find)
        answers.append(label)
        if media >= 4:
            three = [index, *(self._below(media, rows, asked) for _ in range(2))]
            labels3 = [self.numbers[pick(labels, index)] for index in three]
            fields = dict(zip(("label", "label2", "label3"), labels3, strict=True))
            questions.append(self.ask("hear_list" if voice else "list", **fields))
            answers.append(self._lines([pick(contents, index) for index in three]))
        which = self._weighted(kinds[: len(questions)], rows, asked)
        # "Which one says X?" has no answer where two say X.
        clear = pick(self._unique(contents), index)
        which = torch.where((which == 1) & ~clear, 0, which)
        return Asked(choose(questions, which), choose(answers, which))

    def copy(self, facts: Codes | Speech, labels: Tensor) -> Asked:
        """Questions for all texts; the answer has a line of up to 7 tokens for each medium."""
        contents = self.said(facts, len(labels))
        name = "hear_copy" if isinstance(facts, Speech) else "copy"
        label = self.numbers[labels[:, :1]]
        lines = self._lines([text[:, None] for text in contents.unbind(1)])
        return Asked(self.ask(name, label=label), lines)

    def receipts(self, facts: Receipts, labels: Tensor, asked: int) -> Asked:
        """Questions about a price, two prices, the sum, or the sum of two sums."""
        rows, media = labels.shape
        items, prices = (x.view(rows, media, -1) for x in (facts.items, facts.prices))
        totals = facts.totals.view(rows, media)
        index, other = self._each(media, rows, asked), self._below(media, rows, asked)
        label, label2 = self.numbers[pick(labels, index)], self.numbers[pick(labels, other)]
        two = torch.rand(rows, asked, items.shape[-1], device=self.device).argsort(-1)
        lines = [
            [pick(column, index).gather(-1, two[..., n : n + 1])[..., 0] for n in range(2)]
            for column in (items, prices)
        ]
        (item, item2), (price, price2) = lines
        name, name2, cost, cost2 = (
            table[fact]
            for table, fact in zip(
                (self.items, self.items, self.numbers, self.numbers),
                (item, item2, price, price2),
                strict=True,
            )
        )
        questions = [
            self.ask("price", item=name, label=label),
            self.ask("prices", item=name, item2=name2, label=label),
            self.ask("total", label=label),
            self.ask("add", label=label, label2=label2),
        ]
        total = pick(totals, index)
        both = (total + pick(totals, other)).clamp(max=NUMBERS - 1)
        answers = [cost, self._lines([cost, cost2]), self.numbers[total], self.numbers[both]]
        which = self._weighted([3, 2, 2, 2 if media > 1 else 0], rows, asked)
        return Asked(choose(questions, which), choose(answers, which))

    def shapes_(self, facts: Shapes, labels: Tensor, asked: int) -> Asked:
        """Questions about the number of a colour or a shape, or the place of one."""
        rows, media = labels.shape
        index = self._each(media, rows, asked)
        label = self.numbers[pick(labels, index)]
        shapes, colours, cells = (
            pick(x.view(rows, media, -1), index) for x in (facts.shapes, facts.colours, facts.cells)
        )
        present = (shapes >= 0).sum(-1, keepdim=True)
        drawn = (torch.rand(rows, asked, 1, device=self.device) * present).long()
        shape, colour, cell = (x.gather(-1, drawn)[..., 0] for x in (shapes, colours, cells))
        # Sometimes the colour or shape may be absent.
        absent = torch.rand(rows, asked, device=self.device) < 0.3
        any_shape = torch.where(absent, self._below(len(SHAPES), rows, asked), shape)
        any_colour = torch.where(absent, self._below(len(COLOURS), rows, asked), colour)
        row, column = cell // SHAPE_COLUMNS, cell % SHAPE_COLUMNS // 2
        questions = [
            self.ask("count_colour", colour=self.colour[any_colour], label=label),
            self.ask("count_shape", shapes=self.shapes[any_shape], label=label),
            self.ask("place", colour=self.colour[colour], shape=self.shape[shape], label=label),
        ]
        answers = [
            self.numbers[(colours == any_colour[..., None]).sum(-1)],
            self.numbers[(shapes == any_shape[..., None]).sum(-1)],
            self.places[row * 3 + column],
        ]
        which = self._weighted([1, 1, 1], rows, asked)
        return Asked(choose(questions, which), choose(answers, which))

    def about(
        self, facts: object, labels: Tensor, asked: int, kinds: tuple[int, int, int] = (2, 2, 1)
    ) -> Asked:
        """Questions that fit the facts."""
        if isinstance(facts, Receipts):
            return self.receipts(facts, labels, asked)
        if isinstance(facts, Shapes):
            return self.shapes_(facts, labels, asked)
        return self.texts(facts, labels, asked, kinds)

    def _lines(self, texts: list[Tensor]) -> Tensor:
        newline = torch.full_like(texts[0][..., :1], self.newline)
        joined = [part for text in texts for part in (text, newline)]
        return torch.cat(joined[:-1], -1)

    def _each(self, media: int, rows: int, asked: int) -> Tensor:
        """(rows, asked) numbers of media, all different as long as there are enough media.

        If a question came twice, the second answer could be copied from the first.
        """
        drawn = torch.rand(rows, media, device=self.device).argsort(-1)
        return drawn.repeat(1, -(-asked // media))[:, :asked]

    def _below(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, device=self.device)

    def _weighted(self, weights: Sequence[int], rows: int, asked: int) -> Tensor:
        drawn = torch.rand(rows, asked, device=self.device) * sum(weights)
        bounds = [sum(weights[:place]) for place in range(1, len(weights))]
        return sum((drawn >= bound).long() for bound in bounds) + torch.zeros_like(drawn).long()

    @staticmethod
    def _unique(texts: Tensor) -> Tensor:
        """(rows, media) bool: whether no other medium of the row says the same."""
        powers = torch.arange(texts.shape[-1], device=texts.device) * 2 + 1
        # A number for each text; a rare clash only loses a question.
        key = ((texts + 2) * powers * (texts + 7919)).sum(-1) + (texts + 2).sum(-1) * 1_000_003
        return (key[:, :, None] == key[:, None]).sum(-1) == 1
