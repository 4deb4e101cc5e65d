"""Hand-built conversations, and what plain transformers makes of them in one prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import pad
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    DynamicCache,
    Qwen3OmniMoeForConditionalGeneration,
)

from oscar_mm.cache.cache import as_argument
from oscar_mm.media import load_video
from tests.adapters import OwnAdapters

ARGUMENTS = {"image": "images", "video": "videos", "audio": "audio"}
"""Arguments of a chat's methods, by kind of media."""
KINDS = tuple(ARGUMENTS)


@dataclass(frozen=True)
class Said:
    """One turn of a hand-built conversation.

    Attributes:
        prompt: the question.
        media: of each kind what the turn shows, as a chat takes it.
        answer: ids, without the end token.
        unread: how many ids at the end of the answer come in with the next turn only.
        forgotten: places of media in the turn, each with the length of the conversation when it
            was forgotten.
        sound: whether the sound of the videos is heard, of which each has some then.
        adapters: that acted when the turn was read.
    """

    prompt: str
    media: dict[str, list[Any]]
    answer: tuple[int, ...] = ()
    unread: int = 0
    forgotten: tuple[tuple[int, int], ...] = ()
    sound: bool = False
    adapters: tuple[str, ...] = ()

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a chat's ``ask`` besides the prompt."""
        return self.media | ({"use_audio_in_video": True} if self.sound else {})

    @property
    def shown(self) -> list[tuple[str, Any]]:
        """Kind and source of each medium, images first."""
        return [
            (kind, source)
            for kind, name in ARGUMENTS.items()
            for source in self.media.get(name, ())
        ]


@dataclass(frozen=True)
class Script:
    """A hand-built conversation."""

    system: str | None = None
    turns: tuple[Said, ...] = ()

    def with_turn(self, turn: Said) -> Script:
        """With one more turn."""
        return replace(self, turns=(*self.turns, turn))

    def forgetting(self, turn: int, medium: int, length: int) -> Script:
        """Tokens after the first ``length`` no longer see a medium."""
        turns = list(self.turns)
        turns[turn] = replace(turns[turn], forgotten=(*turns[turn].forgotten, (medium, length)))
        return replace(self, turns=tuple(turns))

    def without_last(self, length: int) -> Script:
        """Without the last turn; ``length`` tokens are left, and what comes then is new."""
        turns = [
            replace(
                turn, forgotten=tuple((medium, min(at, length)) for medium, at in turn.forgotten)
            )
            for turn in self.turns[:-1]
        ]
        return replace(self, turns=tuple(turns))


@dataclass(frozen=True, eq=False)
class Layout:
    """Where everything of a script is.

    Attributes:
        ids: (tokens,) of the whole conversation.
        kinds: (tokens,) "text" or the kind of medium that a token is a placeholder of.
        starts: for each turn the index of its first token.
        prompts: for each turn the index after its prompt, where its answer begins.
        spans: for each turn the first and the last token (plus one) of each medium.
        tensors: for each turn further arguments of the model's forward.
        positions: (3, 1, tokens), or of LLaVA (1, tokens).
    """

    ids: torch.Tensor
    kinds: np.ndarray
    starts: list[int]
    prompts: list[int]
    spans: list[list[tuple[int, int]]]
    tensors: list[dict[str, torch.Tensor]]
    positions: torch.Tensor

    def stored(self, script: Script) -> dict[str, int]:
        """Tokens of each kind that are not forgotten and came in with a turn."""
        kinds = self.kinds[: len(self.ids) - script.turns[-1].unread].copy()
        for turn, spans in zip(script.turns, self.spans, strict=True):
            for medium, _ in turn.forgotten:
                kinds[slice(*spans[medium])] = "gone"
        return {kind: int((kinds == kind).sum()) for kind in ("text", *KINDS)}


class Plain:
    """A checkpoint in plain transformers with adapters; its conversations are written by hand.

    Args:
        family: "llava" (on Mistral), "qwen" (Qwen3-VL) or "omni" (Qwen3-Omni).
        folder: of the checkpoint.
    """

    def __init__(self, family: str, folder: Path) -> None:
        self.family = family
        self.processor = AutoProcessor.from_pretrained(folder)
        kind = AutoModelForImageTextToText
        if family == "omni":
            kind = Qwen3OmniMoeForConditionalGeneration
        model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        self.model = (model.thinker if family == "omni" else model).eval()
        self.never_write_control_tokens(self.model)
        self.adapters = OwnAdapters(self.model)

    def never_write_control_tokens(self, model: Any) -> None:
        """A placeholder that is written as an answer would be taken for a medium."""
        ids = self.processor.tokenizer.all_special_ids
        with torch.no_grad():
            model.get_output_embeddings().weight[ids] = 0

    @torch.inference_mode()
    def logits(self, layout: Layout, script: Script) -> torch.Tensor:
        """(tokens, vocabulary) of a whole conversation: one prefill, or where adapters change one
        for each run of turns with the same adapters."""
        length = len(layout.ids)
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        for turn, spans in zip(script.turns, layout.spans, strict=True):
            for medium, since in turn.forgotten:
                start, stop = spans[medium]
                seen[since:, start:stop] = False
        cache, found, start, turns = DynamicCache(), [], 0, iter(layout.tensors)
        for adapters, run in groupby(range(len(script.turns)), lambda n: script.turns[n].adapters):
            *_, last = numbers = list(run)
            stop = length
            if last + 1 < len(script.turns):
                stop = layout.starts[last + 1] - script.turns[last].unread
            self.adapters.use(*adapters)
            output = self.model(
                input_ids=layout.ids[None, start:stop],
                position_ids=layout.positions[..., start:stop],
                attention_mask=seen[None, None, start:stop, :stop],
                use_cache=True,
                **as_argument(cache),
                **_joined([next(turns) for _ in numbers]),
            )
            found.append(output.logits[0])
            start = stop
        return torch.cat(found)

    def layout(self, script: Script) -> Layout:
        """Ids and features of a whole conversation: what the processor makes of its turns."""
        begin = self.processor.tokenizer.bos_token_id if self.family == "llava" else None
        ids = [] if begin is None else [begin]
        starts, prompts, tensors = [], [], []
        for number, turn in enumerate(script.turns):
            text = self._text(script, number)
            inputs = self._inputs(text, turn)
            starts.append(len(ids))
            ids += inputs.pop("input_ids")[0].tolist()
            prompts.append(len(ids))
            ids += turn.answer
            tensors.append(inputs)
        kinds = np.array([self._kind(token) for token in ids])
        spans, positions = [], []
        for number, (turn, start, stop) in enumerate(
            zip(script.turns, starts, prompts, strict=True)
        ):
            spans.append(self._spans(turn, kinds[start:stop], start, tensors[number]))
            first, last = 0 if number == 0 else start, (*starts, len(ids))[number + 1]
            place = positions[-1].max() + 1 if positions else 0
            part = self._positions(torch.tensor([ids[first:last]]), turn, tensors[number])
            positions.append(part + place)
        return Layout(
            torch.tensor(ids), kinds, starts, prompts, spans, tensors, torch.cat(positions, -1)
        )

    def _spans(
        self, turn: Said, kinds: np.ndarray, start: int, tensors: dict[str, torch.Tensor]
    ) -> list[tuple[int, int]]:
        """Where the media of a turn are, whose prompt begins at ``start``."""
        runs, place = [], start
        for is_text, run in groupby(kinds == "text"):
            first, place = place, place + len(list(run))
            runs += [] if is_text else [(first, place)]
        spans, frames = [], iter(tensors.get("video_grid_thw", torch.empty(0, 3)).tolist())
        for kind, _ in turn.shown:
            count = int(next(frames)[0]) if (self.family, kind) == ("qwen", "video") else 1
            spans.append((runs[0][0], runs[count - 1][1]))
            del runs[:count]
        assert not runs
        return spans

    def _text(self, script: Script, number: int) -> str:
        """What comes before the answer of a turn, from the end of the answer before."""
        turn, system = script.turns[number], script.system if not number else None
        if self.family == "llava":
            lead = "</s> " if number else f"<<SYS>>\n{system}\n<</SYS>>\n\n" if system else ""
            return f"{lead}[INST] {self._shown(turn)}{turn.prompt} [/INST]"
        lead = "<|im_end|>\n" if number else ""
        if system:
            lead = f"<|im_start|>system\n{system}<|im_end|>\n"
        question = f"<|im_start|>user\n{self._shown(turn)}{turn.prompt}<|im_end|>\n"
        return f"{lead}{question}<|im_start|>assistant\n"

    def _shown(self, turn: Said) -> str:
        marks = {kind: f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in KINDS}
        marks["audio"] = "<|audio_start|><|audio_pad|><|audio_end|>"
        if self.family == "qwen":  # its processor writes marks around each frame
            marks["video"] = "<|video_pad|>"
        if self.family == "llava":
            marks = {"image": "<image>\n"}
        return "".join(marks[kind] for kind, _ in turn.shown)

    def _inputs(self, text: str, turn: Said) -> dict[str, torch.Tensor]:
        """What the processor makes of a turn."""
        given: dict[str, Any] = {}
        if images := turn.media.get("images"):
            given["images"] = [Image.fromarray(source) for source in images]
        clips = turn.media.get("videos", ())
        videos = [load_video(clip, fps=2.0, sound=turn.sound) for clip in clips]
        sounds = [video.sound.samples for video in videos if video.sound is not None]
        if videos:
            given["videos"] = [video.frames for video in videos]
            given["video_metadata"] = [video.metadata for video in videos]
            given["do_sample_frames"] = False
            if self.family == "omni":
                [given["fps"]] = {video.fps for video in videos}
        recordings = turn.media.get("audio", ())
        if turn.sound:
            given |= self._interleaved(len(videos), len(recordings))
        sounds += [samples for samples, _ in recordings]
        if sounds:
            given |= {"audio": sounds, "sampling_rate": 16_000}
        inputs = dict(
            self.processor(text=[text], **given, add_special_tokens=False, return_tensors="pt")
        )
        for name in ("attention_mask", "mm_token_type_ids"):
            inputs.pop(name, None)
        tensors = {name: torch.as_tensor(value) for name, value in inputs.items()}
        return tensors | self._heard(sounds)

    def _interleaved(self, videos: int, recordings: int) -> dict[str, Any]:
        """Arguments of the processor where videos have sound."""
        if not hasattr(self.processor, "load_audio_from_video"):
            return {"use_audio_in_video": True}  # older versions of transformers
        owners = [*range(videos), *([None] * recordings)]
        return {"load_audio_from_video": True, "audio_from_video_indices": owners}

    def _heard(self, sounds: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        """Features of each recording by itself: beside a longer one its last frames would be read
        together with the silence after it."""
        alone = [
            self.processor(
                text=["<|audio_pad|>"], audio=[one], sampling_rate=16_000, return_tensors="pt"
            )
            for one in sounds
        ]
        names = ("input_features", "feature_attention_mask")
        return _joined([{name: one[name] for name in names} for one in alone])

    def _kind(self, token: int) -> str:
        config = self.model.config
        for kind in KINDS:
            if token == getattr(config, f"{kind}_token_id", None):
                return kind
        return "text"

    def _positions(
        self, ids: torch.Tensor, turn: Said, tensors: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Positions of a turn's (1, tokens) ids, counted from 0, shaped as in ``Layout``."""
        grids = {name: value for name, value in tensors.items() if name.endswith("grid_thw")}
        mask = torch.ones_like(ids)
        if self.family == "omni":
            features = tensors.get("feature_attention_mask")
            return self.model.get_rope_index(
                ids,
                attention_mask=mask,
                use_audio_in_video=turn.sound,
                audio_seqlens=None if features is None else features.sum(-1),
                second_per_grids=tensors.get("video_second_per_grid"),
                **grids,
            )[0]
        if not grids:
            places = torch.arange(ids.shape[1])[None]
            return places if self.family == "llava" else places.expand(3, 1, -1)
        types = torch.tensor([("text", *KINDS).index(self._kind(x)) for x in ids[0].tolist()])
        return self.model.model.get_rope_index(
            ids, mm_token_type_ids=types[None].int(), attention_mask=mask, **grids
        )[0]


def _joined(parts: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Tensors of several media, one after the other, each padded to the largest."""
    found = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        tensors = [part[name] for part in parts if name in part]
        size = [max(sizes) for sizes in zip(*(one.shape[1:] for one in tensors), strict=True)]
        found[name] = torch.cat([_padded(one, size) for one in tensors])
    return found


def _padded(tensor: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """With zeros after all dimensions but the first, up to ``size``."""
    missing = [b - a for a, b in zip(tensor.shape[1:], size, strict=True)]
    return pad(tensor, [x for count in missing[::-1] for x in (0, count)])
