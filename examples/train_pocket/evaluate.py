"""Held-out exact match of a pocket model, task by task."""

from __future__ import annotations

from typing import Any

import torch

from examples.train_pocket.configs import Pocket
from examples.train_pocket.conversation import Plan
from examples.train_pocket.curriculum import RECIPES
from examples.train_pocket.drawing import Look
from examples.train_pocket.pages import CARD
from examples.train_pocket.studio import Step, Studio, exact

SEED = 20_000_003  # far from the seeds of training


def tasks(name: str) -> dict[str, tuple[Plan, tuple[str, ...], bool]]:
    """Name of a cell to plan, themes and copying. One question a conversation."""
    recipe, cells = RECIPES[name], {}
    for number in recipe.image_steps:
        plan = Plan(number, 0, CARD)
        cells[f"codes, {number} images"] = (plan, ("codes",), False)
        if number in (1, 30):
            cells[f"receipts, {number} images"] = (plan, ("receipts",), False)
            cells[f"shapes, {number} images"] = (plan, ("shapes",), False)
        if number in (8, 30, 60):
            cells[f"copy {number} codes"] = (plan, ("codes",), True)
    for number in recipe.clip_steps:
        plan = Plan(0, number, frames=230)
        cells[f"speech, {number} clips"] = (plan, ("codes",), False)
        if number in (10, 40):
            cells[f"copy {number} clips"] = (plan, ("codes",), True)
    if recipe.clip_steps:
        cells["codes and speech, 8 images and 10 clips"] = (Plan(8, 10), ("codes",), False)
    return cells


@torch.no_grad()
def evaluate(
    pocket: Pocket, atlases: tuple, prompts: int, most_media: int = 1000
) -> dict[str, Any]:
    """Exact match of greedy answers on new media of full difficulty.

    Args:
        pocket: the model, on its device, in the dtype to judge.
        atlases: from ``load_atlases``.
        prompts: conversations of a cell, one question each (the mixed cell asks two); a quarter
            of them where a conversation has more than 60 media.
        most_media: leave out cells with more images and clips in a conversation.

    Returns:
        Cell to {"prompts": count, "training fonts and voices": share, "held out": share}.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    studio = Studio(pocket, *atlases, plain=True)
    budget = max(RECIPES[pocket.name].images, 1) // (1 if devices else 40)
    results: dict[str, Any] = {}
    with torch.random.fork_rng(devices):
        for cell, (plan, themes, copy) in tasks(pocket.name).items():
            if plan.images + plan.clips > most_media:
                continue
            torch.manual_seed(SEED)
            media = plan.images + plan.clips
            wanted = prompts if media <= 60 else -(-prompts // 4)
            rows = max(2, min(wanted, budget // media))
            step = Step(plan, rows, 2 if plan.images and plan.clips else 1, themes, copy)
            row: dict[str, Any] = {"prompts": -(-wanted // rows) * rows}
            for label, held_out in (("training fonts and voices", False), ("held out", True)):
                look = Look(1.0, held_out)
                scores = []
                for _ in range(-(-wanted // rows)):
                    sample = studio.sample(step, look, look)
                    scores.append(exact(studio.logits(sample, plan)[0], sample.batch))
                row[label] = round(torch.stack(scores).mean().item(), 4)
            results[cell] = row
    return results
