"""Word problems like those of GSM8K, whose numbers and names come from a seed.

A problem takes three or four steps of arithmetic. A prompt shows one solved problem of each kind
first, so that its pages matter: the answer follows the form of the solved problems.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

_NAMES = ("Anna", "Boris", "Clara", "David", "Elena", "Farid", "Greta", "Hugo", "Irina", "Jonas")
_GOODS = ("apples", "pencils", "stamps", "marbles", "postcards", "buttons", "tickets", "shells")
_SHOWN_SEED = -1
"""Seed of the solved problems."""
_ANSWER = re.compile(r"The answer is (-?[0-9][0-9,]*(?:\.[0-9]+)?)")


@dataclass(frozen=True)
class WordProblem:
    """Problem whose answer is a whole number.

    Attributes:
        name: name with the problem's number, such as "word problem 12".
        question: text of the problem.
        solution: steps, and a last sentence with the answer.
        answer: the answer.
    """

    name: str
    question: str
    solution: str
    answer: int

    @property
    def messages(self) -> list[dict[str, str]]:
        """Conversation with solved problems, whose last message is the question."""
        shown = [_made(kind, kind, _SHOWN_SEED) for kind in range(len(_KINDS))]
        turns = [
            {"role": role, "content": text}
            for one in shown
            for role, text in (("user", one.question), ("assistant", one.solution))
        ]
        return [*turns, {"role": "user", "content": self.question}]

    def passes(self, answer: str) -> bool:
        """Return whether an answer's first "The answer is" gives the right number."""
        found = _ANSWER.search(answer)
        return found is not None and Decimal(found[1].replace(",", "")) == self.answer


def word_problems(count: int) -> list[WordProblem]:
    """Return ``count`` problems, the same in each run; each kind is as frequent as the others."""
    return [_made(number, number % len(_KINDS), number) for number in range(count)]


def _made(number: int, kind: int, seed: int) -> WordProblem:
    draw = random.Random(f"{kind} {seed}")
    question, steps, answer = _KINDS[kind](draw)
    solution = f"{' '.join(steps)} The answer is {answer}."
    return WordProblem(f"word problem {number}", question, solution, answer)


_Made = tuple[str, list[str], int]


def _shop(draw: random.Random) -> _Made:
    name, goods = draw.choice(_NAMES), draw.choice(_GOODS)
    boxes, each, price, paid = (draw.randint(*x) for x in ((4, 19), (6, 24), (2, 9), (1, 4)))
    count = boxes * each
    cost = count * price
    money = cost + paid * draw.randint(11, 97)
    return (
        f"{name} buys {boxes} boxes with {each} {goods} each. One of the {goods} costs {price} "
        f"euros. {name} had {money} euros before. How many euros are left?",
        [
            f"{boxes} boxes of {each} are {boxes} * {each} = {count} {goods}.",
            f"They cost {count} * {price} = {cost} euros.",
            f"Left are {money} - {cost} = {money - cost} euros.",
        ],
        money - cost,
    )


def _ages(draw: random.Random) -> _Made:
    one, two, three = draw.sample(_NAMES, 3)
    first, times, less = draw.randint(6, 19), draw.randint(2, 4), draw.randint(2, 5)
    second = first * times
    third = second - less
    total = first + second + third
    return (
        f"{one} is {first} years old. {two} is {times} times as old as {one}. {three} is {less} "
        f"years younger than {two}. How old are the three together?",
        [
            f"{two} is {first} * {times} = {second} years old.",
            f"{three} is {second} - {less} = {third} years old.",
            f"Together they are {first} + {second} + {third} = {total} years old.",
        ],
        total,
    )


def _wages(draw: random.Random) -> _Made:
    name = draw.choice(_NAMES)
    hours, wage, days, rent = (draw.randint(*x) for x in ((4, 9), (12, 29), (11, 24), (230, 540)))
    daily = hours * wage
    total = daily * days
    return (
        f"{name} works {hours} hours a day and earns {wage} euros an hour. {name} works {days} "
        f"days this month and pays {rent} euros of rent. How many euros remain?",
        [
            f"A day brings {hours} * {wage} = {daily} euros.",
            f"{days} days bring {daily} * {days} = {total} euros.",
            f"After the rent {total} - {rent} = {total - rent} euros remain.",
        ],
        total - rent,
    )


def _shared(draw: random.Random) -> _Made:
    name, goods = draw.choice(_NAMES), draw.choice(_GOODS)
    friends, each, kept, more = (draw.randint(*x) for x in ((3, 9), (7, 34), (5, 29), (11, 48)))
    given = friends * each
    start = given + kept
    end = kept + more
    return (
        f"{name} has {start} {goods}. {name} gives {each} {goods} to each of {friends} friends, "
        f"and later gets {more} new {goods}. How many {goods} does {name} have now?",
        [
            f"{friends} friends get {friends} * {each} = {given} {goods}.",
            f"Then {start} - {given} = {kept} {goods} are left.",
            f"With the new ones {name} has {kept} + {more} = {end} {goods}.",
        ],
        end,
    )


def _trip(draw: random.Random) -> _Made:
    name = draw.choice(_NAMES)
    speed, hours, slow, later = (draw.randint(*x) for x in ((60, 120), (2, 6), (30, 55), (2, 5)))
    first, second = speed * hours, slow * later
    left = draw.randint(15, 180)
    total = first + second + left
    return (
        f"The way of {name} is {total} kilometers long. {name} drives {hours} hours at {speed} "
        f"kilometers an hour, then {later} hours at {slow} kilometers an hour. How many kilometers "
        "are left?",
        [
            f"First {name} drives {hours} * {speed} = {first} kilometers.",
            f"Then {name} drives {later} * {slow} = {second} kilometers.",
            f"Together that is {first} + {second} = {first + second} kilometers.",
            f"Left are {total} - {first + second} = {left} kilometers.",
        ],
        left,
    )


def _garden(draw: random.Random) -> _Made:
    name = draw.choice(_NAMES)
    rows, plants, lost, fruit = (draw.randint(*x) for x in ((5, 18), (6, 21), (3, 17), (3, 12)))
    count = rows * plants
    alive = count - lost
    total = alive * fruit
    return (
        f"{name} plants {rows} rows of {plants} tomato plants. {lost} plants do not survive. Each "
        f"of the others bears {fruit} tomatoes. How many tomatoes does {name} harvest?",
        [
            f"{name} plants {rows} * {plants} = {count} tomato plants.",
            f"Of these {count} - {lost} = {alive} survive.",
            f"They bear {alive} * {fruit} = {total} tomatoes.",
        ],
        total,
    )


def _reading(draw: random.Random) -> _Made:
    name = draw.choice(_NAMES)
    pages, days, faster, rest = (draw.randint(*x) for x in ((14, 36), (3, 8), (5, 19), (3, 7)))
    first, daily = pages * days, pages + faster
    second = daily * rest
    return (
        f"{name} reads {pages} pages a day for {days} days. Then {name} reads {faster} pages more "
        f"a day than before, and finishes the book after {rest} more days. How many pages does the "
        "book have?",
        [
            f"In the first {days} days {name} reads {pages} * {days} = {first} pages.",
            f"Then {name} reads {pages} + {faster} = {daily} pages a day.",
            f"In {rest} days these are {daily} * {rest} = {second} pages.",
            f"The book has {first} + {second} = {first + second} pages.",
        ],
        first + second,
    )


def _bus(draw: random.Random) -> _Made:
    buses, seats, empty, adults = (draw.randint(*x) for x in ((3, 9), (28, 56), (4, 19), (2, 6)))
    places = buses * seats
    people = places - empty
    children = people - buses * adults
    return (
        f"{buses} buses have {seats} seats each. {empty} seats are empty. In each bus {adults} of "
        "the passengers are adults, and all other passengers are children. How many children are "
        "there?",
        [
            f"The buses have {buses} * {seats} = {places} seats.",
            f"There are {places} - {empty} = {people} passengers.",
            f"{buses} * {adults} = {buses * adults} of them are adults.",
            f"So {people} - {buses * adults} = {children} are children.",
        ],
        children,
    )


_KINDS: tuple[Callable[[random.Random], _Made], ...] = (
    *(_shop, _ages, _wages, _shared),
    *(_trip, _garden, _reading, _bus),
)
