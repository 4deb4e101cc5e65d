"""Adapter that makes the pipelines an lmms-eval model (entry point "lmms_eval.models").

Install both with ``pip install '.[lmms-eval]'``.

Example:

    lmms-eval --model oscar_mm --model_args pretrained=Qwen/Qwen3-VL-8B-Instruct,policy=compact \
        --tasks ocrbench
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from accelerate import Accelerator
from lmms_eval.api.instance import Instance  # pyright: ignore[reportMissingImports] loads us
from lmms_eval.api.model import lmms  # pyright: ignore[reportMissingImports]
from lmms_eval.models.registry_v2 import ModelManifest  # pyright: ignore[reportMissingImports]
from PIL import Image

from oscar_mm.errors import InputError
from oscar_mm.pipelines import pipeline_for
from oscar_mm.pipelines.pipeline import Pipeline
from oscar_mm.policy import DEFAULT


class OscarMM(lmms):
    """lmms-eval model that runs a checkpoint with a packed cache, one copy per process.

    Args:
        pretrained: name of a bundled model, folder or hub id.
        policy: name of a preset.
        batch_size: maximum number of questions in progress.
        max_tokens: maximum total tokens of these questions, including their answers.
        device: torch device; ignored with several processes, each of which uses its own GPU.
        dtype: dtype of the weights.
        pipe: loaded pipeline to use, instead of one made of the arguments above.

    Raises:
        InputError: if an argument or a question cannot be used.
    """

    def __init__(
        self,
        pretrained: str = "pocket-vl",
        policy: str = DEFAULT,
        batch_size: int | str = 8,
        max_tokens: int | str = 32_768,
        device: str | None = None,
        dtype: str | None = None,
        pipe: Pipeline | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        # lmms-eval adds arguments of its own, which are None and have no meaning here.
        given = sorted(name for name, value in unknown.items() if value is not None)
        if given:
            raise InputError(
                f"model_args: oscar_mm does not support {', '.join(given)}; leave it out"
            )
        self.accelerator = Accelerator()
        self._rank = self.accelerator.process_index
        self._world_size = self.accelerator.num_processes
        if self._world_size > 1:
            device = str(self.accelerator.device)
        if pipe is None:
            pipe = pipeline_for(pretrained)(pretrained, policy=policy, device=device, dtype=dtype)
        self.pipe = pipe
        self.batch_size, self.max_tokens = int(batch_size), int(max_tokens)

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Answer requests, and return the texts of the answers in the order of the requests."""
        answers = [""] * len(requests)
        results = self.pipe.batch_stream(
            self._questions(requests), batch_size=self.batch_size, max_tokens=self.max_tokens
        )
        for result in results:
            if result.error is not None:
                raise result.error
            text = answers[result.index] = "" if result.answer is None else result.answer.text
            context, options = requests[result.index].args[:2]
            self.cache_hook.add_partial("generate_until", (context, options), text)
        return answers

    def _questions(self, requests: list[Instance]) -> Iterator[dict[str, Any]]:
        """Yield requests for ``Pipeline.batch`` lazily, so that few media are in memory at once."""
        for request in requests:
            context, options, media_of, doc_id, task, split = request.args
            question: dict[str, Any] = {"prompt": context} | _sampling(options)
            for medium in media_of(self.task_dict[task][split][doc_id]) or ():
                name, content = _medium(medium)
                question.setdefault(name, []).append(content)
            yield question

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Raise an error, because this model generates answers but cannot score given answers."""
        raise NotImplementedError("oscar_mm supports generate_until tasks, not loglikelihood")

    def generate_until_multi_round(self, requests: list[Instance]) -> list[str]:
        """Raise an error, because this model supports only single-round tasks."""
        raise NotImplementedError("oscar_mm supports only single-round generate_until tasks")


def manifest() -> ModelManifest:
    """Return the manifest that describes this model to lmms-eval."""
    return ModelManifest("oscar_mm", simple_class_path="oscar_mm.apps.lmms_eval.OscarMM")


def _sampling(options: dict[str, Any]) -> dict[str, Any]:
    """Convert a task's generation_kwargs to ``Sampling`` fields; beam search is not supported."""
    longest = int(options.get("max_new_tokens") or 256)
    fields: dict[str, Any] = {"max_new_tokens": longest, "temperature": 0}
    if until := options.get("until"):
        fields["stop"] = [until] if isinstance(until, str) else list(until)
    if options.get("do_sample") and (temperature := options.get("temperature")):
        fields |= {"temperature": float(temperature), "top_p": float(options.get("top_p") or 1.0)}
    if (options.get("num_beams") or 1) > 1:
        print("oscar_mm: beam search is not supported; answers are greedy", file=sys.stderr)
    return fields


def _medium(medium: Any) -> tuple[str, Any]:
    """Return the name and value of the ``Pipeline.batch`` argument for a media item."""
    if isinstance(medium, Image.Image):
        return "images", medium
    if isinstance(medium, str):
        return "videos", medium
    if isinstance(medium, dict) and "array" in medium:
        samples = np.asarray(medium["array"], dtype=np.float32)
        return "audio", (samples, int(medium["sampling_rate"]))
    if decode := getattr(medium, "get_all_samples", None):  # torchcodec's, since datasets 4
        found = decode()
        return "audio", (np.asarray(found.data, dtype=np.float32), int(found.sample_rate))
    raise InputError(
        f"media of type {type(medium).__name__} are not supported: pass an image, a video or audio"
    )
