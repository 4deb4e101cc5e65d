"""Requests as users make them, and what plain transformers makes of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, BatchFeature

from oscar_mm.engine.message import first_turn
from oscar_mm.engine.prompt import Prompt
from oscar_mm.media import load_video
from oscar_mm.media.media import Media
from oscar_mm.modality import token_modalities
from oscar_mm.pipelines.families.qwen3_vl import Qwen3VL


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    """A picture: (height, width, 3) uint8."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def clip(frames: int, seed: int = 0) -> np.ndarray:
    """A video: (frames, 48, 64, 3) uint8."""
    return np.stack([noise(48, 64, seed + index) for index in range(frames)])


_NO_MEDIA = Media()


def prepare(pipe: Any, prompt: str, media: Media = _NO_MEDIA, system: str | None = None) -> Prompt:
    """A first turn, media and then a question, as the model reads it."""
    return pipe.prepare(first_turn(prompt, media.parts, system), media)


@dataclass(frozen=True)
class Request:
    prompt: str
    images: Sequence[np.ndarray] = ()
    videos: Sequence[np.ndarray] = field(default=())

    def ask(self, pipe: Any, **options: Any) -> Any:
        """The pipeline's answer."""
        return pipe(list(self.images), self.prompt, videos=list(self.videos), **options)


REQUESTS = {
    "text": Request("What did the user ask about the sign?"),
    "image": Request("What is in this image?", [noise(100, 200)]),
    "two images": Request("Compare the pictures.", [noise(64, 64, 1), noise(250, 120, 2)]),
    "video": Request("How many people are in the video?", videos=[clip(6)]),
    "image and video": Request("Where is the sign?", [noise(96, 70, 3)], [clip(5, 10)]),
}


class Reference:
    """The same checkpoint in plain transformers: sdpa and whatever cache is given."""

    def __init__(self, folder: Path, attention: Any = "sdpa") -> None:
        self.processor = AutoProcessor.from_pretrained(folder)
        self.model = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention
        ).eval()

    def inputs(self, requests: Sequence[Request]) -> BatchFeature:
        """The processor's output for a batch, padded on the left."""
        texts, videos = [], []
        for request in requests:
            media = [{"type": "image"}] * len(request.images)
            media += [{"type": "video"}] * len(request.videos)
            turn = {"role": "user", "content": [*media, {"type": "text", "text": request.prompt}]}
            text = self.processor.apply_chat_template(
                [turn], tokenize=False, add_generation_prompt=True
            )
            # As transformers 4.57, with which Qwen3-VL came out, read it.
            pair = "<|vision_start|><|video_pad|><|vision_end|>"
            texts.append(text.replace(pair, "<|video_pad|>"))
            videos += [load_video(video, fps=2.0) for video in request.videos]
        media = {"images": [image for request in requests for image in request.images]}
        if videos:
            media["videos"] = [video.frames for video in videos]
            media["video_metadata"] = [video.metadata for video in videos]
            media["do_sample_frames"] = False
        return self.processor(
            text=texts,
            **{name: value for name, value in media.items() if value},
            padding=True,
            padding_side="left",
            return_tensors="pt",
        )

    def generate(self, inputs: BatchFeature, **options: Any) -> list[list[int]]:
        """Greedy new tokens of each row, up to its end token."""
        options = {"max_new_tokens": 64, "do_sample": False} | options
        output = self.model.generate(**inputs, **options)
        end = options.get("eos_token_id", self.model.generation_config.eos_token_id)
        rows = output[:, inputs["input_ids"].shape[1] :].tolist()
        return [row[: row.index(end)] if end in row else row for row in rows]

    def prompt(self, requests: Sequence[Request]) -> Prompt:
        """A batch for ``oscar_mm.engine.decode_runner.decode``."""
        inputs = dict(self.inputs(requests))
        types, mask = inputs.pop("mm_token_type_ids"), inputs["attention_mask"]
        ids = inputs["input_ids"]
        text = (mask.cumsum(-1) - 1).clamp(min=0)
        grids = {name: value for name, value in inputs.items() if name.endswith("grid_thw")}
        spatial = text.expand(3, -1, -1)
        if grids:
            spatial, _ = self.model.model.get_rope_index(
                ids, mm_token_type_ids=types, attention_mask=mask, **grids
            )
        return Prompt(
            inputs=inputs,
            positions=torch.cat([text[None], spatial]),
            next_position=spatial.amax(dim=(0, 2)) + 1,
            modalities=token_modalities(ids, mm_token_type_ids=types, attention_mask=mask),
            layout=Qwen3VL.layout,
        )


def tone(seconds: float, pitch: float = 440.0, *, seed: int = 0) -> tuple[np.ndarray, int]:
    """A recording: a tone that swells, with some noise, (samples,) float32 and its rate."""
    time = np.arange(round(seconds * 16_000)) / 16_000
    noise_ = np.random.default_rng(seed).standard_normal(len(time))
    swell = 0.3 + 0.2 * np.sin(2 * np.pi * 1.5 * time)
    samples = swell * np.sin(2 * np.pi * pitch * time) + 0.02 * noise_
    return samples.astype(np.float32), 16_000
