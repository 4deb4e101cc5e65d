"""Our pipelines as a model of lmms-eval, which finds it by the entry point "lmms_eval.models":

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
from oscar_mm.policy import DEFAULT


class OscarMM(lmms):
    """A checkpoint that a pipeline reads, over a packed cache; one copy for each process.

    Args:
        pretrained: name of a bundled model, folder or hub id.
        policy: a preset's name.
        batch_size: most questions at once.
        max_tokens: most tokens at once, padding and room for the answers included.
        device, dtype: as of ``Pipeline``; several processes take a GPU each.

    Raises:
        InputError: what cannot be used, also of single questions.
    """

    def __init__(
        self,
        pretrained: str = "pocket-vl",
        policy: str = DEFAULT,
        batch_size: int | str = 8,
        max_tokens: int | str = 32_768,
        device: str | None = None,
        dtype: str | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        # Those that lmms-eval itself adds have no meaning here and are None.
        given = sorted(name for name, value in unknown.items() if value is not None)
        if given:
            raise InputError(f"model_args: oscar_mm takes no {', '.join(given)}")
        self.accelerator = Accelerator()
        self._rank = self.accelerator.process_index
        self._world_size = self.accelerator.num_processes
        if self._world_size > 1:
            device = str(self.accelerator.device)
        self.pipe = pipeline_for(pretrained)(pretrained, policy=policy, device=device, dtype=dtype)
        self.batch_size, self.max_tokens = int(batch_size), int(max_tokens)

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Answers, in the order of the requests."""
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
        """As ``Pipeline.batch`` takes them, one by one: media are not held all at once."""
        for request in requests:
            context, options, media_of, doc_id, task, split = request.args
            question: dict[str, Any] = {"prompt": context} | _sampling(options)
            for medium in media_of(self.task_dict[task][split][doc_id]) or ():
                name, content = _medium(medium)
                question.setdefault(name, []).append(content)
            yield question

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Not supported: the answer would have to be read, not written."""
        raise NotImplementedError("oscar_mm answers generate_until tasks, not loglikelihood")

    def generate_until_multi_round(self, requests: list[Instance]) -> list[str]:
        """Not supported."""
        raise NotImplementedError("oscar_mm answers generate_until tasks of one round")


def manifest() -> ModelManifest:
    """What the entry point gives lmms-eval."""
    return ModelManifest("oscar_mm", simple_class_path="oscar_mm.apps.lmms_eval.OscarMM")


def _sampling(options: dict[str, Any]) -> dict[str, Any]:
    """A task's generation_kwargs as fields of ``Sampling``; beams are not supported."""
    longest = int(options.get("max_new_tokens") or 256)
    found: dict[str, Any] = {"max_new_tokens": longest, "temperature": 0}
    if until := options.get("until"):
        found["stop"] = [until] if isinstance(until, str) else list(until)
    if options.get("do_sample") and (temperature := options.get("temperature")):
        found |= {"temperature": float(temperature), "top_p": float(options.get("top_p") or 1.0)}
    if (options.get("num_beams") or 1) > 1:
        print("oscar_mm: answers are greedy, without beams", file=sys.stderr)
    return found


def _medium(medium: Any) -> tuple[str, Any]:
    """Name of the request's argument, and the medium as it takes it."""
    if isinstance(medium, Image.Image):
        return "images", medium
    if isinstance(medium, str):
        return "videos", medium
    if isinstance(medium, dict) and "array" in medium:
        samples = np.asarray(medium["array"], dtype=np.float32)
        return "audio", (samples, int(medium["sampling_rate"]))
    raise InputError(f"a medium of type {type(medium).__name__}: must be image, video or sound")
