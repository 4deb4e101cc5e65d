"""Train one pocket model.

python -m examples.train_pocket.train pocket-vl --out runs/pocket-vl --seconds 600

A run stops by the clock, not by steps, and continues from its checkpoint.
``--call-seconds`` divides a long training into several calls of the same command.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from examples.train_pocket.configs import NAMES, build
from examples.train_pocket.conversation import IGNORE
from examples.train_pocket.curriculum import RECIPES, Curriculum
from examples.train_pocket.drawing import Look
from examples.train_pocket.evaluate import evaluate
from examples.train_pocket.export import export
from examples.train_pocket.optimizer import RATE, Master, schedule
from examples.train_pocket.studio import Step, Studio, exact, load_atlases

BALANCE = 0.01  # weight of the experts' load-balancing loss
SCORE_EVERY = 20  # steps between looks at the results; a look waits for the device


@dataclass
class Options:
    """Options of the command line.

    Attributes:
        name: name of the model.
        out: folder of checkpoint, curve and export.
        atlases: folder of the atlases.
        seconds: seconds of training in all calls together.
        call_seconds: seconds of training in this call, None for all.
        device: device to train on.
        compile: whether to compile the model and the drawing.
        seed: seed of weights and data.
        scale: share of a step's usual media.
        save_every: seconds between checkpoints.
        prompts: prompts in each cell of the evaluation.
        rate: learning rate.
        adam: use AdamW instead of Muon.
        start: exported model to start from where there is no checkpoint.
        max_media: most media of a prompt in the evaluation; hundreds take a CPU minutes.
    """

    name: str
    out: Path
    atlases: Path = Path("build/pocket")
    seconds: float = 600.0
    call_seconds: float | None = None
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    compile: bool = False
    seed: int = 0
    scale: float = 1.0
    save_every: float = 60.0
    prompts: int = 512
    rate: float = RATE
    adam: bool = False
    start: Path | None = None
    max_media: int = 1000


class Run:
    """A training run: its state and its loop.

    Args:
        options: options of the command line.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        device = torch.device(options.device)
        torch.manual_seed(options.seed)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.pocket = build(options.name, seed=options.seed)
        if options.start is not None:
            # from_pretrained maps names in the file to names in the model, which may differ.
            trained = type(self.pocket.model).from_pretrained(options.start)
            thinker = getattr(trained, "thinker", trained)  # A voice is not trained here.
            self.pocket.generator.load_state_dict(thinker.float().state_dict())
        audio = RECIPES[options.name].clips > 0
        self.atlases = load_atlases(options.atlases, device, audio)
        self.pocket.model.to(device)
        self.master = Master(self.pocket.model, options.rate, not options.adam)
        # ``model.to`` would round the frequencies of RoPE too.
        for weight in self.pocket.model.parameters():
            weight.data = weight.data.to(dtype)
        self.studio = Studio(self.pocket, *self.atlases)
        self.curriculum = Curriculum(RECIPES[options.name], options.seed, options.scale)
        self.step, self.trained, self.saved = 0, 0.0, 0.0
        self.earlier = {"steps": 0, "seconds": 0}  # of the model that this run starts from
        if options.compile:
            torch._dynamo.config.suppress_errors = True  # code that cannot be compiled runs eagerly
            torch._dynamo.config.cache_size_limit = 64
            self.studio.compile()
        options.out.mkdir(parents=True, exist_ok=True)
        if self.checkpoint.is_file():
            # To the CPU: AdamW counts its steps there, and would wait for counts on the device.
            self.load(torch.load(self.checkpoint, map_location="cpu"))
        elif options.start is not None:
            record = json.loads((options.start / "training.json").read_text())
            self.curriculum.load(record["curriculum"])
            self.earlier = {name: record["facts"][name] for name in self.earlier}

    @property
    def checkpoint(self) -> Path:
        """File from which the run can be continued."""
        return self.options.out / "checkpoint.pt"

    @property
    def finished(self) -> bool:
        """Whether all seconds are spent."""
        return self.trained >= self.options.seconds

    def save(self) -> None:
        """Write the checkpoint; a kill during this leaves the old one."""
        state = {
            "master": self.master.state(),
            "curriculum": self.curriculum.state(),
            "step": self.step,
            "trained": self.trained,
            "earlier": self.earlier,
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.checkpoint)
        self.saved = self.trained

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint of ``save``."""
        self.master.load(state["master"])
        self.curriculum.load(state["curriculum"])
        self.step, self.trained, self.earlier = state["step"], state["trained"], state["earlier"]
        self.saved = self.trained
        # The media differ from those before the stop.
        torch.manual_seed(self.options.seed + self.step)
        self.curriculum.dice.seed(self.options.seed + self.step)

    def log(self, **values: Any) -> None:
        """Add a line to the curve."""
        line = {"step": self.step, "seconds": round(self.trained, 1), **values}
        with (self.options.out / "curve.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    def once(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Train one step; return its loss and exact match, still on the device."""
        pictures = Look(self.curriculum.image.difficulty)
        sounds = Look(self.curriculum.clip.difficulty)
        sample = self.studio.sample(step, pictures, sounds)
        logits, balance = self.studio.logits(sample, step.plan)
        targets = sample.batch.targets
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE)
        (loss + BALANCE * balance.float()).backward()
        self.master.step(schedule(self.step, self.trained / self.options.seconds))
        return loss.detach(), exact(logits.detach(), sample.batch)

    def train(self) -> None:
        """Train until the time is up."""
        before = self.trained
        clock = time.monotonic() - before
        limit = self.options.seconds
        if self.options.call_seconds is not None:
            limit = min(limit, before + self.options.call_seconds)
        waiting: list[tuple[Step, torch.Tensor, torch.Tensor]] = []
        while self.trained < limit:
            step = self.curriculum.next()
            waiting.append((step, *self.once(step)))
            self.step += 1
            self.trained = time.monotonic() - clock
            if len(waiting) == SCORE_EVERY or self.trained >= limit:
                self._score(waiting)
                waiting = []
                if self.trained - self.saved > self.options.save_every:
                    self.save()
        self.save()

    def _score(self, waiting: list[tuple[Step, torch.Tensor, torch.Tensor]]) -> None:
        losses = torch.stack([loss for _, loss, _ in waiting]).tolist()
        scores = torch.stack([score for _, _, score in waiting]).tolist()
        if not all(map(math.isfinite, losses)):
            raise FloatingPointError(f"the loss is {losses}; {self.checkpoint} is from before that")
        steps = [step for step, _, _ in waiting]
        self.curriculum.score(list(zip(steps, scores, strict=True)))
        copied = [score for step, score in zip(steps, scores, strict=True) if step.copy]
        image, clip = self.curriculum.image, self.curriculum.clip
        values: dict[str, Any] = {"loss": round(sum(losses) / len(losses), 4)}
        if self.curriculum.recipe.images:
            values |= {"difficulty": round(image.difficulty, 2), "images": image.newest()}
            values["finding"] = (image.stages, round(image.found, 3))
            values["read"] = {number: round(x, 3) for number, x in sorted(image.scores.items())}
        if self.curriculum.recipe.clips:
            values |= {"clip_difficulty": round(clip.difficulty, 2), "clips": clip.newest()}
            values["finding_clips"] = (clip.stages, round(clip.found, 3))
            values["hear"] = {number: round(x, 3) for number, x in sorted(clip.scores.items())}
        if copied:
            values["copy"] = round(sum(copied) / len(copied), 3)
        self.log(**values)

    def finish(self) -> None:
        """Evaluate, then write the model, its card and its results."""
        options = self.options
        prompts = options.prompts if self.finished else options.prompts // 4
        results = evaluate(self.pocket, self.atlases, prompts, options.max_media)
        facts = {
            "steps": self.earlier["steps"] + self.step,
            "seconds": self.earlier["seconds"] + round(self.trained),
            "seed": options.seed,
        }
        if torch.cuda.is_available():
            facts["device"] = torch.cuda.get_device_name()
        folder = options.out / "model"
        export(self.pocket, folder, results, facts, self.curriculum.state())
        self.log(results=results)


def main() -> None:
    """Train and evaluate as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--atlases", type=Path, default=Options.atlases)
    parser.add_argument("--seconds", type=float, default=Options.seconds)
    parser.add_argument("--call-seconds", type=float)
    parser.add_argument("--device", default=Options.device)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--seed", type=int, default=Options.seed)
    parser.add_argument("--scale", type=float, default=Options.scale)
    parser.add_argument("--save-every", type=float, default=Options.save_every)
    parser.add_argument("--prompts", type=int, default=Options.prompts)
    parser.add_argument("--rate", type=float, default=Options.rate)
    parser.add_argument("--start", type=Path)
    parser.add_argument("--most-media", type=int, default=Options.max_media)
    parser.add_argument("--adam", action="store_true", help="AdamW only, for a CPU")
    run = Run(Options(**vars(parser.parse_args())))
    run.train()
    # Also in the middle: the model is usable, and the next call continues.
    run.finish()


if __name__ == "__main__":
    main()
