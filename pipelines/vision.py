"""OscarVLPipeline: answer questions about images and videos, with a packed KV cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Unpack

from oscar_mm.engine.answer import Answer, AnswerStream
from oscar_mm.engine.message_lists import conversation_from
from oscar_mm.engine.request_options import RequestOptions
from oscar_mm.media.media import ImageInput, VideoInput
from oscar_mm.pipelines.pipeline import Pipeline

_ARGUMENTS = ("images", "prompt", "videos", "system", "messages")


class OscarVLPipeline(Pipeline):
    """Pipeline for models of images, videos and text, or of text only, with a packed KV cache.

    ::

        pipe = OscarVLPipeline("Qwen/Qwen3-VL-8B-Instruct")
        answer = pipe(["receipt.jpg"], "What does the receipt total?")
        print(answer.text)
        print(answer.memory)

    The family is chosen by the checkpoint's model type. The arguments are those of
    ``Pipeline.__init__``.
    """

    name = "OscarVLPipeline"

    def __call__(
        self,
        images: ImageInput | Sequence[ImageInput] | None = None,
        prompt: str = "",
        *,
        videos: VideoInput | Sequence[VideoInput] | None = None,
        system: str | None = None,
        messages: Sequence[Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Answer:
        """Answer one question.

        Args:
            images: one image or a list of images: path, PIL image, bytes, open binary file, array
                (H, W[, 1, 3 or 4]) or tensor (C, H, W) or (H, W, C) of uint8 or floats in 0..1, or
                with ``allow_remote`` an http(s) URL. None or [] for no image.
            prompt: the question.
            videos: one video or a list of videos: path, bytes, open binary file, URL or frames.
                LLaVA does not support videos.
            system: system prompt.
            messages: a full conversation instead of a prompt, with texts and media in order; see
                ``oscar_mm.engine.message_lists.messages_from``.
            options: max_new_tokens, temperature, top_p, seed, stop, ..., and media options such as
                max_pixels and fps, which apply to all media; see
                ``oscar_mm.engine.request_options.RequestOptions``.

        Raises:
            InputError: if media, text or numbers are invalid.
            RequestTooLarge: if the request is too long for ``max_context``, ``kv_budget`` or the
                GPU.
        """
        shown: dict[str, Any] = {"videos": videos, "system": system, "messages": messages}
        return self.stream(images, prompt, **shown, **options).complete()

    def stream(
        self,
        images: ImageInput | Sequence[ImageInput] | None = None,
        prompt: str = "",
        *,
        videos: VideoInput | Sequence[VideoInput] | None = None,
        system: str | None = None,
        messages: Sequence[Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> AnswerStream:
        """Answer one question and stream the answer.

        The returned iterator yields text chunks; after the last one, its ``result`` is the answer.
        Its ``with_reasoning`` method also yields a thinking model's reasoning. The request is
        checked and its media are decoded immediately; the model runs as chunks are consumed.
        Arguments and errors are the same as in ``__call__``.
        """
        start = time.perf_counter()
        chosen, template, of_media, adapter = self.read_options(options, _ARGUMENTS)
        media = images, videos, None
        how: dict[str, Any] = {"options": of_media, "open_end": template.takes_any_end}
        asked = conversation_from(prompt, media, messages, system, **how)
        question = self.read_request(
            asked, chosen.max_new_tokens, template=template, adapter=adapter
        )
        return self.answer(question, chosen, start)
