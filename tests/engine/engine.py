"""Answers for tests of the engine, on copies of a tiny Qwen3-VL."""

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from oscar_mm import OscarVLPipeline
from oscar_mm.chat.chat import Chat
from oscar_mm.engine.message import first_turn
from oscar_mm.engine.request import Request
from oscar_mm.media.part import media_parts
from oscar_mm.pipelines.pipeline import Pipeline
from tests.pipelines.conftest import NEVER

SHORT = ["What is on the sign?", "Why?", "Which month was the wettest?", "How much is it?"]
BAD = "Zq9 what?"
"""A prompt with tokens that occur in no other prompt."""
TOKENS = 12


@cache
def checkpoint(folder: Path) -> tuple[PreTrainedModel, Any]:
    """Load model and processor once; copying them takes a sixth of the time of loading."""
    pipe = OscarVLPipeline(folder, device="cpu")
    return pipe.family.outer_model, pipe.processor


def loaded(folder: Path, policy: str = "bf16", **options: Any) -> OscarVLPipeline:
    """Return a pipeline with its own copy of the model and the shared processor."""
    model, processor = checkpoint(folder)
    pipe = OscarVLPipeline(deepcopy(model), processor=processor, policy=policy, **options)
    pipe.model.generation_config.eos_token_id = NEVER
    return pipe


def made(pipe: Pipeline, prompt: str, images: Any = None, **options: Any) -> Request:
    """Return a request that has not started."""
    sampling = pipe.sampling({"max_new_tokens": TOKENS, "temperature": 0} | options, ())
    read = pipe.read_request(first_turn(prompt, media_parts(images)), sampling.max_new_tokens)
    return pipe.new_request(read, sampling, time.perf_counter())


def run(pipe: Pipeline, answers: Sequence[Request], most: int = 5000) -> None:
    """Run until all requests have ended; fail if that takes more than a number of steps."""
    left = itertools.count(most, -1)

    def done() -> bool:
        assert next(left), "the engine turns without an end"
        return all(answer.ended for answer in answers)

    pipe.engine.run_until(done)


def together(pipe: Pipeline, answers: Sequence[Request]) -> list[list[int]]:
    for answer in answers:
        pipe.engine.submit(answer)
    run(pipe, answers)
    return [answer.complete().token_ids for answer in answers]


def alone(pipe: Pipeline, prompts: Sequence[str] = SHORT, **options: Any) -> list[list[int]]:
    return [together(pipe, [made(pipe, prompt, **options)])[0] for prompt in prompts]


@contextmanager
def embedding(pipe: Pipeline, meets: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """Call ``meets`` with the ids of each pass that reads tokens only ``BAD`` has."""
    tokenizer = pipe.processor.tokenizer
    [bad] = {tokenizer("Zq9")["input_ids"][-1]}

    def hook(_: Any, args: tuple) -> None:
        if bool((args[0] == bad).any()):
            meets(args[0])

    handle = pipe.model.get_input_embeddings().register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def spill(pipe: Pipeline, chat: Chat) -> None:
    assert pipe.budget is not None
    file = pipe.budget.new_file()
    pipe.engine.call(lambda: chat._spillable.spill(file))


def empty(pipe: Pipeline, seconds: float = 10) -> bool:
    """Whether all requests have released everything: soon, as the engine's thread may be about to
    release those that were cancelled last."""
    end = time.monotonic() + seconds
    while not (done := _is_empty(pipe)) and time.monotonic() < end:
        time.sleep(0.05)
    return done


def _is_empty(pipe: Pipeline) -> bool:
    gc.collect()
    pipe.engine.call(pipe.store.collect)
    used = pipe.store.memory().used_bytes
    taken = 0 if pipe.budget is None else pipe.budget.taken_bytes
    return not (used or taken or pipe.engine.running or pipe.engine.waiting)


def needed(pipe: Pipeline, answer: Request) -> int:
    growth = pipe.admission.growth(answer.prompt, answer.sampling.max_new_tokens)
    return pipe.admission.growth_bytes(growth)


class SimulatedTimer:
    """Point in time of a simulated device, on which each layer of a prompt and each step takes a
    fixed time, and for which the host never waits."""

    clock = 0.0
    comes_later = True

    def __init__(self, _: torch.device) -> None:
        self.seconds = SimulatedTimer.clock

    def wait(self) -> None:
        """Do nothing; the time is simulated."""

    def since(self, earlier: "SimulatedTimer") -> float:
        return self.seconds - earlier.seconds


@contextmanager
def counted(modules: Any) -> Iterator[list[int]]:
    """Count how often each of some layers reads a prompt or a part of one."""
    counts = [0] * len(modules)

    def count(index: int, _: Any, args: tuple) -> None:
        counts[index] += args[0].shape[1] > 1

    hooks = [x.register_forward_pre_hook(partial(count, i)) for i, x in enumerate(modules)]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()
