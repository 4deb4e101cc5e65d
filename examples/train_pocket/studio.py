"""Studio: draws, speaks and writes whole training steps, on the device of the atlases."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from examples.train_pocket.clips import Recorder
from examples.train_pocket.configs import Pocket
from examples.train_pocket.conversation import IGNORE, Batch, Plan, Writer, together
from examples.train_pocket.drawing import Compositor, Look
from examples.train_pocket.forward import Towers
from examples.train_pocket.glyphs import GlyphAtlas
from examples.train_pocket.pages import Printer
from examples.train_pocket.questions import Asker
from examples.train_pocket.speech import SpeechAtlas

MANY_ROWS = 64
ATLASES = ("glyphs.npz", "speech.npz")


@dataclass(frozen=True)
class Step:
    """One step of training or evaluation.

    Attributes:
        plan: media and labels of each row.
        rows: number of conversations.
        asked: questions in each; 1 for ``copy``.
        themes: contents of the images, "codes", "receipts" or "shapes"; several share the images.
        copy: whether to ask for all texts.
        letters: most letters or digits that a medium says; 0 lets the difficulty decide.
        kinds: weights of reading one, finding one and reading three.
    """

    plan: Plan
    rows: int
    asked: int
    themes: tuple[str, ...] = ("codes",)
    copy: bool = False
    letters: int = 0
    kinds: tuple[int, int, int] = (2, 2, 1)


@dataclass
class Sample:
    """Tokens and media of a step.

    Attributes:
        batch: tokens.
        images: (rows, images, 3, H, W) uint8, or None.
        mel: (rows, clips, bins, frames) float32, or None.
        labels: labels of images and of clips, (rows, count) each.
        waves: (rows * clips, samples) float32, or None.
    """

    batch: Batch
    images: Tensor | None
    mel: Tensor | None
    labels: tuple[Tensor, Tensor]
    waves: Tensor | None


class Studio:
    """Makes samples for one model.

    Args:
        pocket: model and processor, already on its device.
        glyphs: atlas of the pictures.
        speech: atlas of the clips, None without audio.
        plain: ask each question only in its first way and cut nothing off, for evaluation.
    """

    def __init__(
        self, pocket: Pocket, glyphs: GlyphAtlas, speech: SpeechAtlas | None, plain: bool = False
    ) -> None:
        self.towers, self.plain = Towers(pocket), plain
        device = glyphs.cells.device
        self.writer = Writer(pocket, device, self.towers.image_tokens)
        self.asker = Asker(self.writer.speller, plain)
        self.compositor = Compositor(glyphs)
        self.printer = Printer(self.compositor)
        if speech is not None:
            self.recorder = Recorder(speech, pocket.processor.feature_extractor)

    def compile(self) -> None:
        """Compile the towers and the drawing, where a step spends its time."""
        self.towers.compile()
        self.compositor.compile()

    @torch.no_grad()
    def sample(self, step: Step, pictures: Look, sounds: Look) -> Sample:
        """Make media, questions and answers of a step."""
        plan, several, images, mel, waves = step.plan, [], None, None, None
        pictures, sounds = (replace(look, letters=step.letters) for look in (pictures, sounds))
        labels = self.writer.labels(plan, step.rows)
        groups = (len(step.themes) if plan.images else 0) + (plan.clips > 0)
        asked = -(-step.asked // groups)

        def ask(facts: object, their: Tensor) -> None:
            if step.copy:
                several.append(self.asker.copy(facts, their))
            else:
                several.append(self.asker.about(facts, their, asked, step.kinds))

        if plan.images:
            device = self.printer.device
            mixed = len(step.themes) > 1
            order = (torch.randperm if mixed else torch.arange)(plan.images, device=device)
            drawn = []
            for slots, theme in zip(order.tensor_split(len(step.themes)), step.themes, strict=True):
                count = step.rows * len(slots)
                facts, pixels = getattr(self.printer, theme)(count, plan.size, pictures)
                drawn.append(pixels.unflatten(0, (step.rows, len(slots))))
                ask(facts, labels[0][:, slots])
            images = torch.cat(drawn, 1)[:, order.argsort()]
        if plan.clips:
            facts, waves = self.recorder.record(step.rows * plan.clips, plan.frames, sounds)
            mel = self.recorder.mel(waves).unflatten(0, (step.rows, plan.clips))
            ask(facts, labels[1])
        # The longest of many rows has nearly the same length each time; of a few rows it has not.
        steady = step.rows >= MANY_ROWS and not self.plain
        key = (step, pictures.difficulty, sounds.difficulty) if steady else None
        batch = self.writer.write(plan, labels, together(several), key)
        return Sample(batch, images, mel, labels, waves)

    def logits(self, sample: Sample, plan: Plan) -> tuple[Tensor, Tensor]:
        """Logits (rows, tokens, vocabulary) for ``batch.targets``, and the balancing loss."""
        media, layout, batch = [], self.writer.layout(plan), sample.batch
        if sample.images is not None:
            features, deep = self.towers.images(sample.images.flatten(0, 1))
            rows = len(sample.images)
            joined = [part.reshape(rows, -1, part.shape[-1]) for part in (features, *deep)]
            media.append((layout.image_places, joined[0], joined[1:]))
        if sample.mel is not None:
            features = self.towers.clips(sample.mel.flatten(0, 1))
            joined = features.reshape(len(sample.mel), -1, features.shape[-1])
            media.append((layout.clip_places, joined, []))
        hidden, balance = self.towers.text(batch.ids, batch.positions, media)
        return self.towers.lm.lm_head(hidden[:, batch.start - 1 : -1]), balance


def exact(logits: Tensor, batch: Batch) -> Tensor:
    """Share of answers whose tokens are all the most likely ones, as greedy decoding needs."""
    wanted = batch.targets != IGNORE
    wrong = ((logits.argmax(-1) != batch.targets) & wanted).long()
    blank = torch.zeros(len(wrong), batch.questions, dtype=torch.long, device=wrong.device)
    errors = blank.scatter_add(1, batch.asked, wrong)
    tokens = blank.scatter_add(1, batch.asked, wanted.long())
    return ((errors == 0) & (tokens > 0)).sum() / (tokens > 0).sum().clamp(min=1)


def load_atlases(folder: Path, device: torch.device, audio: bool) -> tuple:
    """Load the glyph atlas and, with audio, the speech atlas.

    Raises:
        FileNotFoundError: an atlas is missing; the message has the command that makes it.
    """
    for name in ATLASES[: 1 + audio]:
        if not (folder / name).is_file():
            path, module = folder / name, name.removesuffix(".npz")
            raise FileNotFoundError(
                f"{path} is missing; make it by: python -m examples.train_pocket.{module} {path}"
            )
    glyphs = GlyphAtlas.load(folder / ATLASES[0], device)
    return glyphs, SpeechAtlas.load(folder / ATLASES[1], device) if audio else None
