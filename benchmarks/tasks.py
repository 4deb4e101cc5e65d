"""Tasks of ``benchmarks.accuracy``: conversations with the pocket models, plain or stressed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.train_pocket.configs import Pocket, build
from examples.train_pocket.conversation import Plan
from examples.train_pocket.drawing import Look
from examples.train_pocket.evaluate import FIND, LIST, READ
from examples.train_pocket.studio import Sample, Step, Studio
from oscar_mm.attention import IMPLEMENTATION
from oscar_mm.cache.cache import as_argument
from oscar_mm.compare.teacher_forcing import Forced, Recorder
from oscar_mm.errors import InputError
from oscar_mm.modality import Modality

LOOK = Look(1.0)
"""Level of full difficulty with the fonts and voices used in training, with which the models do
best."""
_MEDIA_AT_ONCE = {"cuda": 6000, "cpu": 120}
_TOKENS_AT_ONCE = {"cuda": 240_000, "cpu": 8_000}
_TOWER_IMAGES = 2048
FRAMES = 230
"""Number of mel frames per clip, which is 2.3 s."""
_KINDS = {"read": READ, "find": FIND, "list": LIST}


@dataclass(frozen=True)
class Task:
    """Task of the benchmark: a kind of question about a number of media.

    Attributes:
        kind: what the question asks: "read" one media item, "find" the media item with a text,
            "list" the content of three, "ask" any question about the theme, or "copy" everything.
        images, clips: number of images and of clips in a conversation.
        theme: content of the images: "codes", "receipts" or "shapes".
        ablate: whether the ablation and the free answers also use the task.
    """

    kind: str
    images: int = 0
    clips: int = 0
    theme: str = "codes"
    ablate: bool = False

    @property
    def name(self) -> str:
        """Name of the task, such as "ask 30 images, receipts"."""
        media = [f"{self.images} images"] * (self.images > 0)
        media += [f"{self.clips} clips"] * (self.clips > 0)
        theme = f", {self.theme}" if self.theme != "codes" else ""
        return f"{self.kind} {' + '.join(media)}{theme}"

    @property
    def family(self) -> str:
        """Group of the task: "copy", in which errors accumulate over the answer, or "ask"."""
        return "copy" if self.kind == "copy" else "ask"

    def step(self, rows: int) -> Step:
        """Return a step of ``rows`` conversations; with images and clips, each asks about both."""
        return Step(
            Plan(self.images, self.clips, frames=FRAMES),
            rows,
            (self.images > 0) + (self.clips > 0),
            (self.theme,),
            copy=self.kind == "copy",
            kinds=_KINDS.get(self.kind, READ),
        )


def _about_images(*counts: int, copied: int) -> list[Task]:
    return [
        *(Task("read", count, ablate=count == 30) for count in counts),
        *(Task(kind, 30) for kind in ("list", "find")),
        *(Task("ask", 30, theme=theme) for theme in ("receipts", "shapes")),
        Task("copy", copied, ablate=True),
    ]


# In Qwen's models, 8 images are 144 tokens, which do not fill a page outside the window. Copying 30
# images takes at least 200 tokens, which pocket-llava cannot do yet.
TASKS = {
    "pocket-vl": _about_images(16, 30, 60, 120, 320, copied=30),
    "pocket-llava": [*_about_images(8, 30, 60, 140, copied=8), Task("copy", 30)],
    "pocket-omni": [
        *_about_images(16, 30, 60, copied=30),
        Task("read", clips=10, ablate=True),
        Task("read", clips=40),
        Task("read", clips=120),
        Task("find", clips=10),
        Task("copy", clips=10),
        Task("copy", clips=40, ablate=True),
        Task("read", images=8, clips=10),
    ],
}


@dataclass
class Conversations:
    """Batch of conversations that share one layout.

    Attributes:
        prefix: decoder arguments for the media and their labels.
        ids: (tokens,) modality ids of the prefix, on the CPU.
        forced: questions and answers, for teacher forcing.
        sample: sample of the studio from which the conversations were created.
    """

    prefix: dict[str, Any]
    ids: Tensor
    forced: Forced
    sample: Sample

    def prefix_in(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return ``prefix`` converted for a model of another dtype."""
        prefix = self.prefix | {"inputs_embeds": self.prefix["inputs_embeds"].to(dtype)}
        if "deepstack_visual_embeds" in prefix:
            stages = prefix["deepstack_visual_embeds"]
            prefix["deepstack_visual_embeds"] = [stage.to(dtype) for stage in stages]
        return prefix

    @torch.no_grad()
    def record(self, model: Any) -> Recorder:
        """Run the model on the prefix, and return a recorder with its keys and values."""
        recorder = Recorder(model)
        model.get_decoder()(**self.prefix, **as_argument(recorder.cache), use_cache=True)
        return recorder


def load(
    name: str, folder: Path | None, device: torch.device, dtype: torch.dtype = torch.float32
) -> Pocket:
    """Load a pocket model from a folder, or create it with random weights.

    In float32, methods differ only in how they store keys and values, which are first rounded to
    bfloat16, as in a 16-bit cache.

    Args:
        name: name of the pocket model.
        folder: folder of the model; None for random weights.
        device: device of the model.
        dtype: dtype of the weights.

    Raises:
        InputError: if the folder does not contain a model.
    """
    pocket = build(name)
    if folder is not None:
        if not (folder / "config.json").is_file():
            raise InputError(
                f"{folder} contains no model; train one as described in examples/train_pocket"
            )
        pocket.model = type(pocket.model).from_pretrained(folder, dtype=dtype)
    pocket.model.to(device).eval()
    pocket.generator.set_attn_implementation({"text_config": IMPLEMENTATION})
    if hasattr(pocket.generator, "set_experts_implementation"):
        pocket.generator.set_experts_implementation("eager")  # The others require 16-bit weights.
    return pocket


def conversations(studio: Studio, task: Task, prompts: int) -> Iterator[Conversations]:
    """Yield batches that contain at least ``prompts`` conversations in total.

    Each batch contains as many conversations as fit. A conversation with images and clips has two
    questions.
    """
    kind, plan = studio.writer.device.type, task.step(1).plan
    length = len(studio.writer.layout(plan).ids)
    most = min(_MEDIA_AT_ONCE[kind] // (task.images + task.clips), _TOKENS_AT_ONCE[kind] // length)
    rows = max(2, min(prompts, most))
    for _ in range(-(-prompts // rows)):
        yield _conversations(studio, studio.sample(task.step(rows), LOOK, LOOK), plan)


@torch.no_grad()
def _conversations(studio: Studio, sample: Sample, plan: Plan) -> Conversations:
    layout, batch, towers = studio.writer.layout(plan), sample.batch, studio.towers
    rows, length = len(batch.ids), batch.start
    hidden = towers.decoder.embed_tokens(batch.ids[:, :length])
    ids = torch.zeros(length, dtype=torch.int8)
    prefix: dict[str, Any] = {"position_ids": _by_row(batch.positions[..., :length], rows)}
    if sample.images is not None:
        parts = [towers.images(part) for part in sample.images.flatten(0, 1).split(_TOWER_IMAGES)]
        features = torch.cat([part[0] for part in parts])
        hidden[:, layout.image_places] = features.view(rows, -1, features.shape[-1])
        ids[layout.image_places.cpu()] = int(Modality.IMAGE)
        if parts[0][1]:
            visual = torch.zeros(rows, length, dtype=torch.bool, device=hidden.device)
            visual[:, layout.image_places] = True
            stages = zip(*(part[1] for part in parts), strict=True)
            prefix["visual_pos_masks"] = visual
            prefix["deepstack_visual_embeds"] = [torch.cat(stage).flatten(0, 1) for stage in stages]
    if sample.mel is not None:
        features = torch.cat(
            [towers.clips(part) for part in sample.mel.flatten(0, 1).split(_TOWER_IMAGES)]
        )
        hidden[:, layout.clip_places] = features.view(rows, -1, features.shape[-1])
        ids[layout.clip_places.cpu()] = int(Modality.AUDIO)
    forced = Forced(
        ids=batch.ids[:, length:-1],
        positions=_by_row(batch.positions[..., length:-1], rows),
        targets=batch.targets[:, 1:],
        answers=batch.asked[:, 1:],
        count=batch.questions,
    )
    return Conversations(prefix | {"inputs_embeds": hidden}, ids, forced, sample)


def _by_row(positions: Tensor, rows: int) -> Tensor:
    """Expand positions of shape (3, tokens) or (tokens,) to (3, rows, tokens) or (rows, tokens)."""
    shape = (*positions.shape[:-1], rows, positions.shape[-1])
    return positions.unsqueeze(-2).expand(shape)


FACTORS = (8.0, 16.0)
"""Scale factors, each for one rotary pair per layer; powers of two do not change the rounding."""


@contextmanager
def outlier_channels(model: Any, seed: int) -> Iterator[None]:
    """Within the block, scale the keys of two rotary pairs per layer by 8 and 16.

    The corresponding query channels are divided by the same factors, so that attention scores do
    not change. Both channels of a pair have the same factor, because RoPE mixes them. The factors
    are applied to the weights of the QK norms or, in a model without them, of the projections.
    """
    generator = torch.Generator().manual_seed(seed)
    saved = []
    for layer in model.get_decoder().layers:
        attention = layer.self_attn
        half = attention.head_dim // 2
        pairs = torch.randperm(half, generator=generator)[: len(FACTORS)]
        scale = torch.ones(attention.head_dim)
        for pair, factor in zip(pairs.tolist(), FACTORS, strict=True):
            scale[[pair, pair + half]] = factor
        names = ("q_norm", "k_norm") if hasattr(attention, "k_norm") else ("q_proj", "k_proj")
        for name, power in zip(names, (-1, 1), strict=True):
            weight = getattr(attention, name).weight
            saved.append((weight, weight.detach().clone()))
            by_head = weight.data.view(-1, attention.head_dim, *weight.shape[1:])
            factor = scale.to(weight).pow(power)
            by_head *= factor.view(1, -1, *[1] * (weight.ndim - 1))
    try:
        yield
    finally:
        for weight, old in saved:
            weight.data.copy_(old)
