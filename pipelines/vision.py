"""OscarVLPipeline: images, videos and a question in, an answer out, over a packed KV cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Unpack

from oscar_mm.generation.answer import Answer, AnswerStream
from oscar_mm.generation.sampling import SamplingOptions
from oscar_mm.media.image import ImageSource
from oscar_mm.media.video import VideoSource
from oscar_mm.pipelines.pipeline import Pipeline

_ARGUMENTS = ("images", "prompt", "videos", "system")


class OscarVLPipeline(Pipeline):
    """Ask LLaVA-v1.6 or Qwen3-VL about images and videos; keys and values stay in 2-bit pages.

    ::

        pipe = OscarVLPipeline("Qwen/Qwen3-VL-8B-Instruct")
        answer = pipe(["receipt.jpg"], "What does the receipt total?")
        print(answer.text)
        print(answer.memory)

    The checkpoint's model type says which family it is. Arguments are those of ``Pipeline``.
    """

    name = "OscarVLPipeline"

    def __call__(
        self,
        images: ImageSource | Sequence[ImageSource] | None,
        prompt: str,
        *,
        videos: VideoSource | Sequence[VideoSource] | None = None,
        system: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Answer:
        """Answer one question.

        Args:
            images: one image or a list: path, PIL image, (H, W[, 1, 3 or 4]) array, bytes, or with
                ``allow_remote`` an http(s) address. None or [] for none.
            prompt: the question.
            videos: one video or a list, of paths or of frames. LLaVA reads none.
            system: system prompt.
            sampling: max_new_tokens, temperature, top_p, top_k, repetition_penalty, seed, stop: see
                ``oscar_mm.generation.sampling.SamplingOptions``.

        Raises:
            InputError: media, text or numbers that cannot be used; as ``NoRoom`` a request that
                is too long for ``max_context``, ``kv_budget`` or the GPU.
        """
        return self.stream(images, prompt, videos=videos, system=system, **sampling).complete()

    def stream(
        self,
        images: ImageSource | Sequence[ImageSource] | None,
        prompt: str,
        *,
        videos: VideoSource | Sequence[VideoSource] | None = None,
        system: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> AnswerStream:
        """Answer one question; an iterator of pieces of text with the answer as ``result``.

        Its ``with_reasoning`` gives the pieces of a thinking model's reasoning too. The request is
        checked and its media are read at once; the model runs as pieces are taken. Arguments and
        errors are those of a call.
        """
        start = time.perf_counter()
        chosen = self.sampling(sampling, _ARGUMENTS)
        shown = {"images": images, "videos": videos}
        question = self.read_request(prompt, shown, system, chosen.max_new_tokens)
        return AnswerStream(self.answer(question, chosen, start))
