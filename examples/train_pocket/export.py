"""Export: writes a trained pocket model with its card."""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from examples.train_pocket.configs import Pocket
from examples.train_pocket.curriculum import RECIPES
from examples.train_pocket.language import QUESTIONS

MEDIA = {
    "pocket-vl": "pictures",
    "pocket-llava": "pictures",
    "pocket-omni": "pictures and short spoken clips",
}
EXAMPLES = {
    "label": 17,
    "label2": 3,
    "label3": 8,
    "item": "TEA",
    "item2": "HAM",
    "colour": "red",
    "shape": "circle",
}
LEARNT = 0.5  # exact match below which a card lists a task as not learnt


def card(pocket: Pocket, results: dict[str, Any], facts: dict[str, Any]) -> str:
    """The model card, in Markdown."""
    size = sum(weight.numel() for weight in pocket.model.parameters())
    audio = RECIPES[pocket.name].clips > 0
    lines = [
        f"# {pocket.name}",
        "",
        f"A {type(pocket.model).__name__} of {size / 1e6:.2f} million parameters, trained from",
        f"scratch to answer questions about many {MEDIA[pocket.name]} in one conversation. It is",
        "made for tests and demos of KV caches: its answers must come out of the cache.",
        "",
        "What it was trained on: reading printed codes, digits and words (capital letters) on",
        "plain pictures of about 192 x 96 pixels; reading and adding prices on short receipts;",
        "counting and locating coloured shapes; saying which picture shows a code; writing out all",
        "codes. The table says how well it learnt each.",
    ]
    if audio:
        lines.append("Also hearing digits and 16 words in clips of 1 to 3.5 s of espeak-ng voices.")
    weak = [cell for cell, row in results.items() if row["training fonts and voices"] < LEARNT]
    if weak:
        lines += ["", "What it did not learn: " + "; ".join(weak) + "."]
    lines += ["", "The questions that it knows, in these words only:", ""]
    lines += [f"- {question}" for question in _questions(audio)]
    lines += [
        "",
        "Its chat template writes a label such as `Picture 1:` before each medium. With the",
        "template's variable `add_vision_id` set to false it does not, and texts of the message",
        "can be the labels.",
        "",
        "What it cannot do: anything else. It knows no language beyond the questions it was",
        "trained on, no photographs, no videos, no lower-case print, no scripts but Latin, no",
        "human voices were tried, and it has never seen a question without an answer.",
        "",
        "Data: drawn and spoken by the scripts in examples/train_pocket, never twice the same.",
        "Training: " + ", ".join(f"{name} {value}" for name, value in facts.items()) + ".",
        "",
        "Exact match of greedy answers, full difficulty, 16-bit cache:",
        "",
        "| task | training fonts and voices | held out | prompts |",
        "| --- | --- | --- | --- |",
    ]
    for cell, row in results.items():
        seen, held_out = row["training fonts and voices"], row["held out"]
        lines.append(f"| {cell} | {seen:.3f} | {held_out:.3f} | {row['prompts']} |")
    return "\n".join(lines) + "\n"


def _questions(audio: bool) -> list[str]:
    """All ways of asking, a line for each kind of question, with examples filled in."""
    kinds = [name for name in QUESTIONS if audio or not name.startswith("hear")]
    return [
        " / ".join(f"`{way.format(**EXAMPLES, code=_code(name))}`" for way in QUESTIONS[name])
        for name in kinds
    ]


def _code(name: str) -> str:
    return "472" if name.startswith("hear") else "K7Q4"


def export(
    pocket: Pocket,
    folder: Path,
    results: dict[str, Any],
    facts: dict[str, Any],
    curriculum: dict[str, Any],
) -> None:
    """Write weights in bfloat16, configs, tokenizer, processor, card and training.json.

    training.json has the results and the curriculum, from which training can continue. The folder
    appears when it is complete, and replaces an older one.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model = copy.deepcopy(pocket.model).to("cpu", torch.bfloat16)  # buffers are not saved
    Pocket(pocket.name, model, pocket.processor).save(partial)
    (partial / "README.md").write_text(card(pocket, results, facts))
    record = {"facts": facts, "results": results, "curriculum": curriculum}
    (partial / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)
