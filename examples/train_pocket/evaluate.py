"""Held-out exact match of a pocket model, task by task."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from examples.train_pocket.configs import Pocket
from examples.train_pocket.conversation import Plan
from examples.train_pocket.curriculum import RECIPES
from examples.train_pocket.drawing import Look
from examples.train_pocket.pages import CARD
from examples.train_pocket.studio import Step, Studio, exact

SEED = 20_000_003  # far from the seeds of training
READ, FIND, LIST = (1, 0, 0), (0, 1, 0), (0, 0, 1)


def tasks(name: str) -> dict[str, Step]:
    """Steps of one conversation and one question (the mixed cell: two), by name of the cell."""
    recipe, cells = RECIPES[name], {}
    for number in recipe.image_steps:
        plan = Plan(number, 0, CARD)
        cells[f"read a code, {number} images"] = Step(plan, 1, 1, kinds=READ)
        if number in (8, 30):
            cells[f"find a code, {number} images"] = Step(plan, 1, 1, kinds=FIND)
            cells[f"read three codes, {number} images"] = Step(plan, 1, 1, kinds=LIST)
        if number in (1, 30):
            cells[f"receipts, {number} images"] = Step(plan, 1, 1, ("receipts",))
            cells[f"shapes, {number} images"] = Step(plan, 1, 1, ("shapes",))
        if number in (8, 30, 60):
            cells[f"copy {number} codes"] = Step(plan, 1, 1, copy=True)
    for number in recipe.clip_steps:
        plan = Plan(0, number, frames=230)
        cells[f"hear one, {number} clips"] = Step(plan, 1, 1, kinds=READ)
        if number in (10, 40):
            cells[f"find one, {number} clips"] = Step(plan, 1, 1, kinds=FIND)
            cells[f"copy {number} clips"] = Step(plan, 1, 1, copy=True)
    if recipe.clip_steps:
        cells["codes and speech, 8 images and 10 clips"] = Step(Plan(8, 10), 1, 2)
    return cells


@torch.no_grad()
def evaluate(pocket: Pocket, atlases: tuple, prompts: int, max_media: int = 1000) -> dict[str, Any]:
    """Exact match of greedy answers on new media of full difficulty.

    Args:
        pocket: the model, on its device, in the dtype to judge.
        atlases: atlases from ``load_atlases``.
        prompts: conversations of a cell, with one question each (the mixed cell: two); a cell with
            more than 60 media in a conversation has a quarter of them.
        max_media: cells with more images and clips in a conversation are left out.

    Returns:
        {"prompts": count, "training fonts and voices": share, "held out": share} by cell.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    studio = Studio(pocket, *atlases, plain=True)
    budget = max(RECIPES[pocket.name].images, 1) // (1 if devices else 40)
    results: dict[str, Any] = {}
    with torch.random.fork_rng(devices):
        for cell, step in tasks(pocket.name).items():
            plan = step.plan
            if plan.images + plan.clips > max_media:
                continue
            torch.manual_seed(SEED)
            media = plan.images + plan.clips
            wanted = prompts if media <= 60 else -(-prompts // 4)
            rows = max(2, min(wanted, budget // media))
            step = replace(step, rows=rows)
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
