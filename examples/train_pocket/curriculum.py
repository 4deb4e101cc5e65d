"""Curriculum: which step comes next, with harder pictures, more of them, more questions."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field
from typing import Any

from examples.train_pocket.clips import FRAMES
from examples.train_pocket.conversation import Plan
from examples.train_pocket.pages import CARD, PAGE, WIDE
from examples.train_pocket.studio import Step

HARDER_FROM = 0.6  # exact match at which single media get harder
MORE_FROM = 0.45  # exact match at which more media come; it is low, as finding is learnt late
MAX_ROWS, MAX_ASKED = 1280, 12
NEXT_STAGE_FROM = 0.75  # exact match at which finding a medium gets harder
# Stages of "which medium says this": numbers of media, and most letters of a code. Nothing else
# teaches finding: models that read every code were at chance after 15,000 steps.
FINDING = ((2, 1), (2, 2), (4, 2), (8, 2), (8, 4), (16, 6), (30, 6))
FIND_ONLY = (0, 1, 0)  # ``Step.kinds``
OPEN_UP = 0.5  # difficulty at which more media and other pictures come in


@dataclass(frozen=True)
class Recipe:
    """Sizes for one model.

    Attributes:
        images, clips: media in one step, over all conversations; 0 for none.
        image_steps, clip_steps: numbers of media that a conversation can have, ascending.
        sizes: sizes of pictures other than CARD.
    """

    images: int
    clips: int
    image_steps: tuple[int, ...]
    clip_steps: tuple[int, ...] = ()
    sizes: tuple[tuple[int, int], ...] = (PAGE, WIDE)


RECIPES = {
    "pocket-vl": Recipe(1920, 0, (1, 2, 4, 8, 16, 30, 60, 120, 320)),
    "pocket-llava": Recipe(960, 0, (1, 2, 4, 8, 16, 30, 60, 140), sizes=(PAGE,)),
    "pocket-omni": Recipe(1440, 960, (1, 2, 4, 8, 16, 30, 60), (1, 2, 4, 10, 20, 40, 80, 240)),
}


@dataclass
class Ladder:
    """Progress with one kind of medium.

    Attributes:
        steps: numbers of media.
        reached: how many of ``steps`` are in use.
        difficulty: 0.1 to 1.
        scores: running exact match for each number of media.
        stages: how many of ``FINDING`` are in use.
        found: running exact match of the newest stage.
    """

    steps: tuple[int, ...]
    reached: int = 1
    difficulty: float = 0.1
    scores: dict[int, float] = field(default_factory=dict)
    stages: int = 1
    found: float = 0.0

    def newest(self) -> int:
        """The largest number of media in use."""
        return self.steps[self.reached - 1]

    def draw(self, dice: random.Random, limit: int) -> int:
        """A number of media: half the time the newest, until all are in use."""
        usable = [step for step in self.steps[: self.reached] if step <= limit]
        climbing = self.reached < len(self.steps)
        return usable[-1] if climbing and dice.random() < 0.5 else dice.choice(usable)

    def stage(self, dice: random.Random) -> tuple[int, int]:
        """A stage of ``FINDING``: mostly the newest, until all are in use."""
        climbing = self.stages < len(FINDING)
        newest = climbing and dice.random() < 0.7
        return FINDING[self.stages - 1] if newest else dice.choice(FINDING[: self.stages])

    def update_found(self, values: list[float]) -> None:
        """Take in exact matches of the last steps of the newest stage."""
        if not values:
            return
        self.found = 0.5 * self.found + 0.5 * sum(values) / len(values)
        if self.found > NEXT_STAGE_FROM and self.stages < len(FINDING):
            self.stages, self.found = self.stages + 1, 0.0

    def update(self, seen: dict[int, list[float]]) -> None:
        """Take in exact matches of the last steps, by number of media."""
        for number, values in seen.items():
            mean = sum(values) / len(values)
            self.scores[number] = 0.5 * self.scores.get(number, mean) + 0.5 * mean
        if 1 in seen and self.scores[1] > HARDER_FROM:
            self.difficulty = min(1.0, self.difficulty + 0.03)
        if not self.steps:
            return
        newest = self.newest()
        ready = newest in seen and self.scores[newest] > MORE_FROM
        if ready and self.difficulty >= OPEN_UP and self.reached < len(self.steps):
            self.reached += 1


class Curriculum:
    """Chooses steps.

    Args:
        recipe: sizes for the model.
        seed: seed of the choices.
        scale: share of the recipe's media in a step; tests and CPUs use less.
    """

    def __init__(self, recipe: Recipe, seed: int, scale: float = 1.0) -> None:
        self.recipe, self.scale = recipe, scale
        self.dice = random.Random(seed)
        self.image, self.clip = Ladder(recipe.image_steps), Ladder(recipe.clip_steps)

    def next(self) -> Step:
        """Choose the next step."""
        if not self.recipe.clips:
            return self._images()
        kind = self.dice.random()
        wide = min(self.image.reached, self.clip.reached) >= 3
        if wide and kind < 0.15:
            return self._both()
        return self._images() if kind < 0.45 else self._clips()

    def _look(self, plan: dict[str, Any], most: int) -> Plan:
        fitting = [digits for digits in (1, 2, 3) if most <= 9 * 10 ** (digits - 1)]
        digits = self.dice.choice(fitting) if self.dice.random() < 0.5 else 0
        fillers = self.dice.randint(1, 3) if self.dice.random() < 0.3 else 0
        return Plan(**plan, digits=digits, fillers=fillers)

    def _rows(self, budget: int, media: int) -> int:
        # A question takes as many tokens as a picture: single pictures make the longest batches.
        return max(2, round(min(budget / media, MAX_ROWS) * self.scale))

    def _images(self) -> Step:
        ladder, dice = self.image, self.dice
        if self._finds(ladder):
            number, letters = ladder.stage(dice)
            plan = self._look({"images": number, "clips": 0}, number)
            rows = self._rows(self.recipe.images, number)
            return Step(plan, rows, self._asked(number), letters=letters, kinds=FIND_ONLY)
        number = ladder.draw(dice, ladder.newest())
        themes, size = ("codes",), CARD
        kind = dice.random() if ladder.difficulty >= OPEN_UP else 0.0
        if kind > 0.9 and number >= 4:
            themes = ("codes", "receipts", "shapes")
        elif kind > 0.75:
            themes = ("shapes",)
        elif kind > 0.5:
            themes = ("receipts",)
        if ladder.difficulty >= OPEN_UP and number <= 60 and dice.random() < 0.25:
            size = dice.choice(self.recipe.sizes)
            if size == PAGE and "shapes" in themes:
                size = CARD
        area = size[0] * size[1] / (CARD[0] * CARD[1])
        rows = self._rows(self.recipe.images, number * area)
        plan = self._look({"images": number, "clips": 0, "size": size}, number)
        if themes == ("codes",) and self._copies(number, ladder):
            return Step(plan, rows, 1, themes, copy=True)
        return Step(plan, rows, self._asked(number), themes)

    def _clips(self) -> Step:
        if self._finds(self.clip):
            number, letters = self.clip.stage(self.dice)
            plan = self._look({"images": 0, "clips": number}, number)
            rows = self._rows(self.recipe.clips, number)
            return Step(plan, rows, self._asked(number), letters=letters, kinds=FIND_ONLY)
        number = self.clip.draw(self.dice, self.clip.newest())
        frames = self.dice.choice(FRAMES)
        if self.clip.difficulty < OPEN_UP:
            frames = min(frames, 180)
        budget = round(self.recipe.clips * 180 / max(frames, 180))
        plan = self._look({"images": 0, "clips": number, "frames": frames}, number)
        rows = self._rows(budget, number)
        if self._copies(number, self.clip):
            return Step(plan, rows, 1, copy=True)
        return Step(plan, rows, self._asked(number))

    def _both(self) -> Step:
        images = self.image.draw(self.dice, 30)
        clips = self.clip.draw(self.dice, 40)
        rows = min(self._rows(self.recipe.images, images), self._rows(self.recipe.clips, clips))
        frames = self.dice.choice([frames for frames in FRAMES if frames <= 230])
        plan = self._look({"images": images, "clips": clips, "frames": frames}, max(images, clips))
        return Step(plan, rows, self._asked(images + clips))

    def _copies(self, number: int, ladder: Ladder) -> bool:
        return 4 <= number <= 60 and ladder.newest() >= 4 and self.dice.random() < 0.5

    def _finds(self, ladder: Ladder) -> bool:
        share = 0.4 if ladder.stages < len(FINDING) else 0.15
        return ladder.difficulty >= OPEN_UP and self.dice.random() < share

    @staticmethod
    def _asked(number: int) -> int:
        return min(MAX_ASKED, number)

    def score(self, results: list[tuple[Step, float]]) -> None:
        """Take in exact matches of the last steps; plain questions on codes and clips count."""
        for ladder, kind in ((self.image, "images"), (self.clip, "clips")):
            other = "clips" if kind == "images" else "images"
            seen: dict[int, list[float]] = {}
            newest = []
            for step, value in results:
                number = getattr(step.plan, kind)
                if step.copy or step.themes != ("codes",) or getattr(step.plan, other):
                    continue
                if not step.letters:
                    seen.setdefault(number, []).append(value)
                elif (number, step.letters) == FINDING[ladder.stages - 1]:
                    newest.append(value)
            seen.pop(0, None)
            ladder.update(seen)
            ladder.update_found(newest)

    def state(self) -> dict[str, Any]:
        """Progress to save, ready for JSON."""
        return {"image": asdict(self.image), "clip": asdict(self.clip)}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, which may have been JSON in between."""
        for name in ("image", "clip"):
            saved = dict(state[name], steps=tuple(state[name]["steps"]))
            saved["scores"] = {int(number): x for number, x in saved["scores"].items()}
            setattr(self, name, Ladder(**saved))
