"""`oscar-mm serve` with a model whose answers have as many tokens as a client asks for.

The model is a bundled one, a checkpoint, or one of ``RELEASED`` with random weights. Options are
those of `oscar-mm serve` and --tiny, which makes a random model small.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import oscar_mm.pipelines
from benchmarks.random_model import NEVER, RELEASED, build
from oscar_mm import cli
from oscar_mm.apps import options as command_options
from oscar_mm.models import check_source as check_model_source
from oscar_mm.pipelines import OscarOmniPipeline, OscarVLPipeline
from oscar_mm.pipelines.loading import device_of
from oscar_mm.pipelines.pipeline import Pipeline

ENTRY = ("-c", "from benchmarks.endless_server import main; raise SystemExit(main())")
"""Python's arguments before the server's options."""


def make_endless(pipe: Pipeline) -> Pipeline:
    """Make a pipeline's greedy answers end at their limit alone, with text in every token.

    Tokens without text, or with a part of a character, get the logit 0, below that of others: a
    server sends no piece for such a token, so that a client could not tell when it came.
    """
    tokenizer = pipe.processor.tokenizer
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))], skip_special_tokens=True)
    silent = [place for place, text in enumerate(texts) if not text or "\ufffd" in text]
    weight = pipe.model.get_output_embeddings().weight
    if weight is pipe.model.get_input_embeddings().weight:
        raise ValueError("the output layer shares its weights with the input")
    with torch.no_grad():
        weight[silent] = 0
        weight[len(texts) :] = 0
    pipe.model.generation_config.eos_token_id = NEVER
    return pipe


def random_pipeline(
    name: str,
    *,
    tiny: bool = False,
    device: str | None = None,
    device_map: str | None = None,
    dtype: str | None = None,
    **options: Any,
) -> Pipeline:
    """A pipeline of a released model with random weights.

    Args:
        name: key of ``RELEASED``.
        tiny: whether the model is small.
        device: of the model; by default a GPU if there is one.
        device_map: is not supported.
        dtype: of the model; by default bfloat16, on a CPU float32.
        options: of the pipeline.
    """
    if device_map is not None:
        raise ValueError("a model with random weights is made on one device")
    released, target = RELEASED[name], device_of(device)
    default = "float32" if target.type == "cpu" else "bfloat16"
    model, processor = build(
        released.tiny() if tiny else released, target, getattr(torch, dtype or default)
    )
    kind = OscarOmniPipeline if released.audio else OscarVLPipeline
    return kind(model, processor=processor, **options)


def endless_pipeline(
    model: str | Path,
    *,
    tiny: bool = False,
    usual: Callable[[str | Path], Callable[..., Pipeline]] = oscar_mm.pipelines.pipeline_for,
    **options: Any,
) -> Pipeline:
    """A pipeline whose answers end at their limit alone.

    Args:
        model: key of ``RELEASED``, for random weights, or as of ``pipeline_for``.
        tiny: whether a random model is small.
        usual: finds the pipeline of other models.
        options: of the pipeline.
    """
    if model in RELEASED:
        return make_endless(random_pipeline(str(model), tiny=tiny, **options))
    return make_endless(usual(model)(model, **options))


def main() -> int:
    """Serve until a signal."""
    arguments = sys.argv[1:]
    tiny = "--tiny" in arguments
    usual = oscar_mm.pipelines.pipeline_for

    def pipeline_for(model: str | Path) -> Callable[..., Pipeline]:
        return partial(endless_pipeline, tiny=tiny, usual=usual)

    def check_source(model: str | Path) -> None:
        if model not in RELEASED:
            check_model_source(model)

    # The command takes the functions from there when it runs.
    setattr(oscar_mm.pipelines, "pipeline_for", pipeline_for)  # noqa: B010
    setattr(command_options, "check_source", check_source)  # noqa: B010
    return cli.run(["serve", *(option for option in arguments if option != "--tiny")])
