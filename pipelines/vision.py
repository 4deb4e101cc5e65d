"""OscarVLPipeline: images, videos and a question in, an answer out, over a packed KV cache."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedModel

from oscar_mm.answer import Answer, AnswerStream, Timings
from oscar_mm.cache.cache import OscarCache
from oscar_mm.decoding import Prompt, decode
from oscar_mm.detokenize import Detokenizer
from oscar_mm.errors import InputError
from oscar_mm.media import MediaLimits, load_image, load_video
from oscar_mm.media.source import describe
from oscar_mm.modality import Modality
from oscar_mm.pipelines.loading import load
from oscar_mm.pipelines.qwen3_vl import Qwen3VL
from oscar_mm.policy import KVPolicy
from oscar_mm.sampling import Sampling

FAMILIES = (Qwen3VL,)

ImageSource = str | Path | bytes | Image.Image | np.ndarray
VideoSource = str | Path | np.ndarray | Sequence[Image.Image | np.ndarray]


class OscarVLPipeline:
    """Ask about images and videos; the keys and values of the prompt are kept in 2-bit pages.

    ::

        pipe = OscarVLPipeline("Qwen/Qwen3-VL-8B-Instruct")
        answer = pipe(["receipt.jpg"], "What does the receipt total?")
        print(answer.text)
        print(answer.memory)

    Args:
        model: hub id, local folder, or a loaded model (then with ``processor``, or it is loaded
            from where the model came from).
        processor: processor of a loaded model.
        policy: how keys and values are stored: a ``KVPolicy`` or a preset's name.
        device: "cuda", "cpu", ...; by default a GPU if there is one.
        dtype: of the weights; by default the checkpoint's on a GPU, float32 on a CPU.
        attn_implementation: attention of the vision tower ("sdpa", "flash_attention_2", "eager");
            by default "sdpa", or what a loaded model has.
        max_context: most tokens of prompt and answer; by default what the model was made for.
        prefill_chunk: read prompts this many tokens at a time, which bounds activations; later
            chunks then read packed history (``oscar_mm.prefill``). None: in one go, exact.
        allow_remote: let ``images`` be http(s) addresses.
        limits: bounds on media.
        video_fps: frames per second that are sampled from videos.
        model_kwargs: handed to ``from_pretrained``: device_map, quantization_config, revision, ...

    Raises:
        InputError: arguments that cannot be used; the message says what would be right.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        *,
        processor: Any = None,
        policy: str | KVPolicy = "compact",
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        attn_implementation: str | None = None,
        max_context: int | None = None,
        prefill_chunk: int | None = None,
        allow_remote: bool = False,
        limits: MediaLimits | None = None,
        video_fps: float = 2.0,
        model_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.policy = KVPolicy.of(policy)
        for name, value in (("max_context", max_context), ("prefill_chunk", prefill_chunk)):
            if value is not None and (type(value) is not int or value < 1):
                raise InputError(f"{name}={value!r}: must be a positive number of tokens or None")
        is_number = isinstance(video_fps, int | float) and not isinstance(video_fps, bool)
        if not (is_number and 0 < video_fps < math.inf):
            raise InputError(f"video_fps={video_fps!r}: must be frames per second, above 0")
        if limits is not None and not isinstance(limits, MediaLimits):
            raise InputError(f"limits: must be MediaLimits or None, not {type(limits).__name__}")
        self.family = load(
            model,
            processor,
            FAMILIES,
            device=device,
            dtype=dtype,
            towers=attn_implementation,
            model_kwargs={} if model_kwargs is None else model_kwargs,
        )
        longest = self.model.config.get_text_config().max_position_embeddings
        self.max_context = min(max_context or longest, longest)
        self.prefill_chunk = prefill_chunk
        self.allow_remote = allow_remote
        self.limits = limits or MediaLimits()
        self.video_fps = video_fps

    @property
    def model(self) -> Any:
        """The model of transformers."""
        return self.family.model

    @property
    def processor(self) -> Any:
        """Its processor."""
        return self.family.processor

    def __call__(
        self,
        images: ImageSource | Sequence[ImageSource] | None,
        prompt: str,
        *,
        videos: VideoSource | Sequence[VideoSource] | None = None,
        system: str | None = None,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        **unknown: Any,
    ) -> Answer:
        """Answer one question.

        Args:
            images: one image or a list: path, PIL image, (H, W[, 1, 3 or 4]) array, bytes, or with
                ``allow_remote`` an http(s) address. None or [] for none.
            prompt: the question.
            videos: one video or a list, of paths or of frames.
            system: system prompt.
            max_new_tokens, temperature, top_p, top_k, repetition_penalty, seed, stop: see
                ``oscar_mm.sampling.Sampling``.

        Raises:
            InputError: media, text or numbers that cannot be used, or a request that is longer
                than ``max_context``.
        """
        stream = self.stream(
            images,
            prompt,
            videos=videos,
            system=system,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            repetition_penalty=repetition_penalty,
            seed=seed,
            stop=stop,
            **unknown,
        )
        for _ in stream:
            pass
        return stream.result

    def stream(
        self,
        images: ImageSource | Sequence[ImageSource] | None,
        prompt: str,
        *,
        videos: VideoSource | Sequence[VideoSource] | None = None,
        system: str | None = None,
        **sampling: Any,
    ) -> AnswerStream:
        """As ``__call__``, but an iterator of pieces of text with the answer as ``result``.

        The request is checked and its media are read at once; the model runs as pieces are taken.
        """
        start = time.perf_counter()
        known = [field.name for field in fields(Sampling)]
        if unknown := sampling.keys() - known:
            raise InputError(
                f"unknown argument {', '.join(sorted(unknown))}: choose from images, prompt, "
                f"videos, system, {', '.join(known)}"
            )
        how = Sampling(**sampling)
        prepared = self._prepare(images, prompt, videos, system)
        self._check_length(prepared, how.max_new_tokens)
        return AnswerStream(self._answer(prepared, how, start))

    def _prepare(self, images: Any, prompt: str, videos: Any, system: str | None) -> Prompt:
        self._check_text("prompt", prompt)
        if system is not None:
            self._check_text("system", system)
        pictures = [
            load_image(
                source,
                allow_remote=self.allow_remote,
                limits=self.limits,
                label=describe(source, f"images[{index}]"),
            )
            for index, source in enumerate(_listed(images))
        ]
        clips = [
            load_video(
                source,
                limits=self.limits,
                fps=self.video_fps,
                label=describe(source, f"videos[{index}]"),
            )
            for index, source in enumerate(_listed_videos(videos))
        ]
        messages = self.family.messages(prompt, system, len(pictures), len(clips))
        return self.family.prompt(messages, pictures, clips)

    def _check_text(self, name: str, text: Any) -> None:
        if not isinstance(text, str):
            raise InputError(f"{name} must be text, not {type(text).__name__}")
        if not text.strip():
            raise InputError(f"{name} is empty: give some text")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise InputError(f"{name} holds bytes that are no UTF-8 text: take them out")
        self.family.refuse_control_tokens(name, text)

    def _check_length(self, prompt: Prompt, max_new_tokens: int) -> None:
        if prompt.tokens + max_new_tokens > self.max_context:
            media = [span for span in prompt.spans[0] if span.modality is not Modality.TEXT]
            largest = max((span.length for span in media), default=0)
            raise InputError(
                f"the prompt has {prompt.tokens} tokens ({sum(span.length for span in media)} of "
                f"media, at most {largest} for one image or pair of frames) and max_new_tokens is "
                f"{max_new_tokens}, together over the context of {self.max_context}: give fewer or "
                "smaller media, a shorter prompt or a smaller max_new_tokens"
            )

    def _answer(self, prompt: Prompt, sampling: Sampling, start: float) -> Iterator[str | Answer]:
        cache = OscarCache(self.policy)
        text = Detokenizer(self.processor.tokenizer, sampling.stop)
        steps = decode(
            self.model,
            prompt,
            cache,
            sampling,
            end_tokens=self.family.end_tokens(),
            prefill_chunk=self.prefill_chunk,
        )
        first = last = None
        for [token] in steps:
            last = time.perf_counter()
            first = first or last
            yield text.push(token)
            if text.stopped:
                break
        yield text.finish()
        count = len(text.token_ids)
        first = first or time.perf_counter()
        decode_s = (last or first) - first
        ended = text.stopped or count < sampling.max_new_tokens
        yield Answer(
            text=text.text,
            token_ids=text.token_ids,
            memory=cache.memory(),
            timings=Timings(
                prefill_s=first - start,
                decode_s=decode_s,
                tokens_per_s=(count - 1) / decode_s if decode_s else 0.0,
            ),
            finish_reason="stop" if ended else "length",
            prompt_tokens=prompt.tokens,
        )


def _listed(images: Any) -> list[Any]:
    if images is None:
        return []
    return list(images) if isinstance(images, list | tuple) else [images]


def _listed_videos(videos: Any) -> list[Any]:
    """A list of videos; a list of frames is one video, as is a (T, H, W, 3) array."""
    if videos is None:
        return []
    if not isinstance(videos, list | tuple):
        return [videos]
    return [videos] if videos and all(map(_is_frame, videos)) else list(videos)


def _is_frame(one: Any) -> bool:
    return isinstance(one, Image.Image) or (isinstance(one, np.ndarray) and one.ndim < 4)
