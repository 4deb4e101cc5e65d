"""OscarVLPipeline: images, videos and a question in, an answer out, over a packed KV cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from oscar_mm.generation.answer import Answer, AnswerStream
from oscar_mm.media.image import ImageSource
from oscar_mm.media.video import VideoSource
from oscar_mm.pipelines.pipeline import Pipeline


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
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        **unknown: Any,
    ) -> Answer:
        """Answer one question.

        Args:
            images: one image or a list: path, PIL image, (H, W[, 1, 3 or 4]) array, bytes, or with
                ``allow_remote`` an http(s) address. None or [] for none.
            prompt: the question.
            videos: one video or a list, of paths or of frames. LLaVA reads none.
            system: system prompt.
            max_new_tokens: longest answer, in tokens; by default 256, and 8,192 more for the
                reasoning of a thinking model (at most half of the context).
            temperature: 0 takes the likeliest token, above 0 samples. By default the checkpoint's
                generation_config says how tokens are chosen, which may be by sampling.
            top_p, top_k, repetition_penalty, seed, stop: see ``oscar_mm.generation.sampling``. The
                first three are by default the checkpoint's too, but off beside a temperature.

        Raises:
            InputError: media, text or numbers that cannot be used; as ``NoRoom`` a request that
                is too long for ``max_context``, ``kv_budget`` or the GPU.
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

        ``with_reasoning`` of it gives the pieces of a thinking model's reasoning too.

        The request is checked and its media are read at once; the model runs as pieces are taken.
        """
        start = time.perf_counter()
        how = self.sampling(sampling, ("images", "prompt", "videos", "system"))
        self.check_texts(prompt, system)
        shown = {"images": images, "videos": videos}
        self.check_ahead(prompt, system, shown, how.max_new_tokens)
        prepared = self.prepare(prompt, self.read_media(**shown), system)
        self.check_length(prepared, how.max_new_tokens)
        return AnswerStream(self.answer(prepared, how, start))
