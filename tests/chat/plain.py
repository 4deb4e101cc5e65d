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
    Qwen3OmniMoeForConditionalGeneration,
)

from oscar_mm.media import load_video

ARGUMENTS = {"image": "images", "video": "videos", "audio": "audio"}
"""Of a chat, by kind of media."""
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
    """

    prompt: str
    media: dict[str, list[Any]]
    answer: tuple[int, ...] = ()
    unread: int = 0
    forgotten: tuple[tuple[int, int], ...] = ()

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
        prompts: for each turn the index after its prompt, where its answer begins.
        spans: for each turn the first and the last token (plus one) of each medium.
        tensors: further arguments of the model's forward.
    """

    ids: torch.Tensor
    kinds: np.ndarray
    prompts: list[int]
    spans: list[list[tuple[int, int]]]
    tensors: dict[str, torch.Tensor]

    def stored(self, script: Script) -> dict[str, int]:
        """Tokens of each kind that are not forgotten and came in with a turn."""
        kinds = self.kinds[: len(self.ids) - script.turns[-1].unread].copy()
        for turn, spans in zip(script.turns, self.spans, strict=True):
            for medium, _ in turn.forgotten:
                kinds[slice(*spans[medium])] = "gone"
        return {kind: int((kinds == kind).sum()) for kind in ("text", *KINDS)}


class Plain:
    """A checkpoint in plain transformers; its conversations are written by hand.

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

    def never_write_control_tokens(self, model: Any) -> None:
        """A placeholder that is written as an answer would be taken for a medium."""
        ids = self.processor.tokenizer.all_special_ids
        with torch.no_grad():
            model.get_output_embeddings().weight[ids] = 0

    @torch.inference_mode()
    def logits(self, layout: Layout, script: Script) -> torch.Tensor:
        """(tokens, vocabulary) of a whole conversation, read at once."""
        length = len(layout.ids)
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        for turn, spans in zip(script.turns, layout.spans, strict=True):
            for medium, since in turn.forgotten:
                start, stop = spans[medium]
                seen[since:, start:stop] = False
        return self.model(
            input_ids=layout.ids[None],
            position_ids=self._positions(layout),
            attention_mask=seen[None, None],
            use_cache=False,
            **layout.tensors,
        ).logits[0]

    def layout(self, script: Script) -> Layout:
        """Ids and features of a whole conversation: what the processor makes of its turns."""
        texts = [self._text(script, number) for number in range(len(script.turns))]
        shown = [one for turn in script.turns for one in turn.shown]
        inputs = dict(
            self.processor(
                text=texts,
                **self._media(shown),
                add_special_tokens=False,
                padding=True,
                return_tensors="pt",
            )
        )
        rows, masks = inputs.pop("input_ids"), inputs.pop("attention_mask").bool()
        begin = self.processor.tokenizer.bos_token_id if self.family == "llava" else None
        ids = [] if begin is None else [begin]
        prompts, starts = [], []
        for turn, row, mask in zip(script.turns, rows, masks, strict=True):
            starts.append(len(ids))
            ids += row[mask].tolist()
            prompts.append(len(ids))
            ids += turn.answer
        kinds = np.array([self._kind(token) for token in ids])
        spans = []
        frames = iter(inputs.get("video_grid_thw", torch.empty(0, 3)).tolist())
        for turn, start, stop in zip(script.turns, starts, prompts, strict=True):
            runs, place = [], start
            for kind, run in groupby(kinds[start:stop].tolist()):
                first, place = place, place + len(list(run))
                runs += [] if kind == "text" else [(first, place)]
            spans.append([])
            for kind, _ in turn.shown:
                count = int(next(frames)[0]) if (self.family, kind) == ("qwen", "video") else 1
                spans[-1].append((runs[0][0], runs[count - 1][1]))
                del runs[:count]
            assert not runs
        inputs.pop("mm_token_type_ids", None)
        tensors = {name: torch.as_tensor(value) for name, value in inputs.items()}
        tensors |= self._heard([one for kind, one in shown if kind == "audio"])
        return Layout(torch.tensor(ids), kinds, prompts, spans, tensors)

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

    def _media(self, shown: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        given: dict[str, Any] = {}
        if images := [Image.fromarray(source) for kind, source in shown if kind == "image"]:
            given["images"] = images
        if videos := [load_video(source, fps=2.0) for kind, source in shown if kind == "video"]:
            given["videos"] = [video.frames for video in videos]
            given["video_metadata"] = [video.metadata for video in videos]
            given["do_sample_frames"] = False
            if self.family == "omni":
                [given["fps"]] = {video.fps for video in videos}
        if audio := [source for kind, source in shown if kind == "audio"]:
            given["audio"] = [samples for samples, _ in audio]
            [given["sampling_rate"]] = {rate for _, rate in audio}
        return given

    def _heard(self, recordings: Sequence[tuple[np.ndarray, int]]) -> dict[str, torch.Tensor]:
        """Features of each recording by itself: beside a longer one its last frames would be read
        together with the silence after it."""
        if not recordings:
            return {}
        names = ("input_features", "feature_attention_mask")
        alone = [
            self.processor(
                text=["<|audio_pad|>"], audio=[samples], sampling_rate=rate, return_tensors="pt"
            )
            for samples, rate in recordings
        ]
        longest = max(one[names[1]].shape[1] for one in alone)
        return {
            name: torch.cat([pad(one[name], (0, longest - one[name].shape[-1])) for one in alone])
            for name in names
        }

    def _kind(self, token: int) -> str:
        config = self.model.config
        for kind in KINDS:
            if token == getattr(config, f"{kind}_token_id", None):
                return kind
        return "text"

    def _positions(self, layout: Layout) -> torch.Tensor:
        ids, tensors = layout.ids[None], layout.tensors
        grids = {name: value for name, value in tensors.items() if name.endswith("grid_thw")}
        mask = torch.ones_like(ids)
        if self.family == "omni":
            features = tensors.get("feature_attention_mask")
            return self.model.get_rope_index(
                ids,
                attention_mask=mask,
                audio_seqlens=None if features is None else features.sum(-1),
                second_per_grids=tensors.get("video_second_per_grid"),
                **grids,
            )[0]
        if not grids:
            return torch.arange(ids.shape[1])[None]
        types = torch.tensor([("text", *KINDS).index(kind) for kind in layout.kinds])
        return self.model.model.get_rope_index(
            ids, mm_token_type_ids=types[None].int(), attention_mask=mask, **grids
        )[0]
