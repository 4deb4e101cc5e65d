"""Conversations with a full-size random model, whose forward passes are repeated for each cache."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from transformers import Cache, DynamicCache

from benchmarks.profiling import allocated, allocated_since
from benchmarks.random_model import Released, build
from oscar_mm import OscarCache, OscarOmniPipeline, OscarVLPipeline
from oscar_mm.attention import IMPLEMENTATION
from oscar_mm.chat.chat import Chat
from oscar_mm.engine import prefill_runner
from oscar_mm.engine.prefill import read_in_chunks, read_prompt
from oscar_mm.engine.prompt import Prompt, forward
from oscar_mm.media.media import Medium
from oscar_mm.media.resample import RATE
from oscar_mm.modality import Modality
from oscar_mm.moe_switch import IMPLEMENTATION as EXPERTS
from oscar_mm.ops import append, decode, pack, unpack
from oscar_mm.pages.quantize import Recipe
from oscar_mm.pipelines.pipeline import Pipeline
from tests.tiny import TEXT

POLICY = "compact"
BATCHES = (1, 2, 4, 8, 16)
"""Batch sizes for the comparison of two implementations of experts."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a conversation.

    Attributes:
        picture: width and height of each picture, in pixels.
        checked: number of tokens of the prompt that compares a kept cache with a fresh cache.
        text: approximate number of text tokens of a later turn.
        answer: number of tokens of an answer.
        steps: number of further tokens of a long answer.
        audio_share: share of audio in the first prompt, if the model supports audio.
        chunk: number of tokens per chunk of a prompt that is prefilled in chunks.
    """

    picture: tuple[int, int] = (1280, 960)
    checked: int = 8192
    text: int = 1000
    answer: int = 7
    steps: int = 40
    audio_share: float = 0.25
    chunk: int = 8192


TINY = Sizes((160, 128), checked=300, text=40, answer=3, steps=2, chunk=128)


class Bench:
    """Random model with its pipelines, which share the weights.

    Args:
        released: shapes of the model.
        sizes: sizes of the conversations.
        device: device of the model.
    """

    def __init__(self, released: Released, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        start = perf_counter()
        model, self.processor = build(released, device, torch.bfloat16)
        kind = OscarOmniPipeline if released.audio else OscarVLPipeline
        self.pipe = kind(model, processor=self.processor, policy=POLICY)
        self.exact = kind(model, processor=self.processor, policy="bf16")
        more = {"policy": POLICY, "prefill_chunk": sizes.chunk}
        self.chunked = kind(model, processor=self.processor, **more)
        self.numbers = np.random.default_rng(0)
        self.facts = {
            "source": ", ".join(filter(None, (released.source, released.part))),
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "weights": sum(weight.nbytes for weight in model.parameters()),
            "build_s": perf_counter() - start,
        }

    def media(self, tokens: int) -> dict[str, list[Any]]:
        """Return media with a total of about ``tokens`` tokens.

        These are pictures and, if the model supports audio, a recording.
        """
        media: dict[str, list[Any]] = {}
        if Modality.AUDIO in self.pipe.family.reads:
            seconds = int(tokens * self.sizes.audio_share / 13)
            noise = self.numbers.standard_normal(seconds * RATE)
            media["audio"] = [((0.1 * noise).astype(np.float32), RATE)]
            tokens -= 13 * seconds
        picture = self.picture()
        each = self.pipe.family.min_tokens(Medium(Modality.IMAGE, picture, "")) + 2
        rest = max(0, tokens // each - 1)
        return media | {"images": [picture, *(self.picture() for _ in range(rest))]}

    def picture(self) -> Image.Image:
        """Return a picture that contains random noise."""
        width, height = self.sizes.picture
        pixels = self.numbers.integers(0, 256, (height, width, 3), dtype=np.uint8)
        return Image.fromarray(pixels)

    def text(self) -> str:
        """Return the text of a later turn, with about ``sizes.text`` tokens."""
        tokenizer = self.processor.tokenizer
        ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
        times = -(-self.sizes.text // len(ids))
        return tokenizer.decode((ids * times)[: self.sizes.text])

    def ask(self, chat: Chat, prompt: str = "What is it?", **media: list[Any]) -> Any:
        """Ask a question in a chat, and return the greedy answer of ``sizes.answer`` tokens."""
        return chat.ask(prompt, **media, max_new_tokens=self.sizes.answer, temperature=0)

    def warm_up(self) -> None:
        """Compile and check the kernels, and let libraries allocate their workspaces."""
        with self.pipe.chat() as chat:
            self.ask(chat, images=[self.picture()])
            self.ask(chat, self.text())

    def conversation(self, context: int, *, full: bool) -> dict[str, Any]:
        """Run a chat, repeat its forward passes with each cache, and return a row of measurements.

        Args:
            context: approximate number of tokens of the first prompt.
            full: whether to also measure saving, loading and forgetting, and to repeat the passes
                twice. If False, prefill of the first prompt in chunks is measured instead.
        """
        before = allocated(self.device)
        media = self.media(context - 64)
        with self.pipe.chat() as chat, record_calls(self.pipe.model) as calls:
            first = self.ask(chat, **media)
            row = self.facts | {
                "context": context,
                "prompt_tokens": first.prompt_tokens,
                "images": len(media["images"]),
                "audio_s": sum(len(samples) / rate for samples, rate in media.get("audio", [])),
                "request_s": first.timings.prefill_s,
                "memory": first.memory.to_dict(),
                "held": allocated_since(
                    before, allocated(self.device), tensors_on(self.device, calls)
                ),
                "kernels": kernels_used(self.pipe),
            }
            answers = [
                first,
                self.ask(chat, self.text(), images=[self.picture()]),
                self.ask(chat, self.text()),
            ]
            row["pipeline_step_ms"] = self._step_ms(chat)
            if full:
                row |= self._save(chat) | self._forget(chat)
        passes = with_steps(calls[:3], [answer.token_ids for answer in answers])
        row["ms"] = self._part_times(passes, rounds=2 if full else 1)
        if full:
            row["experts"] = self._expert_times(passes[1])
        else:
            row["chunked"] = self._in_chunks(media)
        return row

    def _cache(self) -> OscarCache:
        return OscarCache(POLICY, model=self.pipe.model)

    def _in_chunks(self, media: dict[str, list[Any]]) -> dict[str, Any]:
        """Measure memory and prefill time of the first answer with a prompt split into chunks."""
        before = allocated(self.device)
        with self.chunked.chat() as chat, record_calls(self.pipe.model) as calls:
            self.ask(chat, **media)
            memory = allocated_since(before, allocated(self.device), tensors_on(self.device, calls))
        chunk = self.sizes.chunk
        [seconds], _ = replay(self.pipe.model, calls, self._cache(), chunk)
        return {"chunk": chunk, "held": memory, "prefill_ms": 1e3 * seconds}

    def kept_cache_error(self) -> dict[str, Any]:
        """Measure how much a later turn's logits on a kept cache differ from a fresh prefill."""
        media = self.media(self.sizes.checked)
        with self.exact.chat() as chat, record_calls(self.exact.model) as calls:
            first = self.ask(chat, **media)
            self.ask(chat, self.text(), images=[self.picture()])
        calls = [*with_steps(calls[:1], [first.token_ids]), calls[1]]
        with self._attention("sdpa"):
            fresh = replay(self.pipe.model, [join_calls(self.pipe.family, calls)], DynamicCache())[
                1
            ]
            plain = replay(self.pipe.model, calls, DynamicCache())[1]
        return {
            "tokens": sum(call.tokens for call in calls),
            "difference": difference(calls[-1], fresh[-1]),
            "dynamic": difference(plain[-1], fresh[-1]),
            "same_token": int(calls[-1].logits.argmax()) == int(fresh[-1].logits.argmax()),
        }

    def _expert_times(self, call: Call) -> dict[str, Any]:
        """Measure the milliseconds of a decode step by implementation of experts and batch size."""
        model, times = self.pipe.model, {}
        usual = model.get_experts_implementation()
        for batch in BATCHES if EXPERTS in usual.values() else ():
            inputs = {"input_ids": call.prompt.inputs["input_ids"].expand(batch, -1)}
            positions = call.prompt.positions.expand(-1, batch, -1)
            several = Call(replace(call.prompt, inputs=inputs, positions=positions), call.logits)
            for name in ("grouped_mm", "batched_mm"):
                model.set_experts_implementation(name)
                cache = DynamicCache()
                seconds, _ = replay(model, [several] * self.sizes.answer, cache)
                times[f"{name} x {batch}"] = step_ms(seconds[1:])
        model.set_experts_implementation(usual)
        return times

    def _part_times(self, calls: Sequence[Call], rounds: int) -> dict[str, dict[str, float]]:
        """Measure the milliseconds of each part of a conversation, by cache."""
        turn = self.sizes.answer
        steps = [index for index in range(len(calls)) if index % turn]
        times: dict[str, dict[str, float]] = {}
        for name, attention in (("oscar", IMPLEMENTATION), ("dynamic", "sdpa")):
            with self._attention(attention):
                for _ in range(rounds):
                    cache = self._cache() if name == "oscar" else DynamicCache()
                    seconds, _ = replay(self.pipe.model, calls, cache)
                    del cache
            times[name] = {
                "prefill": 1e3 * seconds[0],
                "step": step_ms([seconds[index] for index in steps]),
                "turn_picture": 1e3 * seconds[turn],
                "turn_text": 1e3 * seconds[2 * turn],
            }
        return times | {
            "tokens": {"turn_picture": calls[turn].tokens, "turn_text": calls[2 * turn].tokens}
        }

    def _step_ms(self, chat: Chat) -> float:
        """Return the milliseconds per token, as the difference of a long and a short answer."""
        seconds = []
        for tokens in (self.sizes.answer, self.sizes.answer + self.sizes.steps):
            with chat.fork() as twin:
                seconds.append(twin.ask("?", max_new_tokens=tokens, temperature=0).timings.decode_s)
        return 1e3 * (seconds[1] - seconds[0]) / self.sizes.steps

    def _save(self, chat: Chat) -> dict[str, Any]:
        """Save and load a chat, and compare the next answers of both chats."""
        report = chat.memory
        _ = self.pipe.fingerprint  # Not timed, because it is computed only once per model.
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "chat.safetensors"
            start = perf_counter()
            chat.save(path)
            saved = perf_counter()
            loaded = self.pipe.load_chat(path)
            end = perf_counter()
            size = path.stat().st_size
        with loaded:
            answers = [self.ask(copy).token_ids for copy in (loaded, chat)]
        return {
            "saved_bytes": size,
            "saved_ratio": report.bf16_bytes / size,
            "save_s": saved - start,
            "load_s": end - saved,
            "same_after_load": answers[0] == answers[1],
        }

    def _forget(self, chat: Chat) -> dict[str, Any]:
        """Forget the pictures of the first turn one after another, and ask another question."""
        pictures = [
            segment
            for segment in chat.segments
            if not segment.turn and segment.modality is Modality.IMAGE
        ]
        before, start = chat.memory.kv_bytes, perf_counter()
        for picture in pictures:
            chat.forget(picture.index)
        seconds = perf_counter() - start
        freed = before - chat.memory.kv_bytes
        self.ask(chat)
        return {
            "forget_ms": 1e3 * seconds / len(pictures),
            "forgotten_bytes": sum(picture.bytes for picture in pictures),
            "freed_bytes": freed,
        }

    @contextmanager
    def _attention(self, name: str) -> Iterator[None]:
        """Within the block, use another attention implementation in the decoder."""
        self.pipe.model.set_attn_implementation({"text_config": name})
        try:
            yield
        finally:
            self.pipe.model.set_attn_implementation({"text_config": IMPLEMENTATION})


def kernels_used(pipe: Pipeline) -> dict[str, bool]:
    """Return, for each operation of decode steps, whether its CUDA kernel supports the pages."""
    pools, policy = pipe.store.layers[0], pipe.policy
    config = pipe.model.config.get_text_config(decoder=True)
    group = config.num_attention_heads // config.num_key_value_heads
    formats = [pools.formats[bits] for bits in sorted(pools.formats)]
    decodes = decode.decode_kernel(
        formats, pools.head_dim, policy.rotate, pools.dtype, group, pools.device
    )
    packs = [
        pack.PackKernel.of(pack.Specialization(Recipe.of(form, policy), pools.dtype), pools.device)
        for form in formats
    ]
    unpacks = [
        unpack.UnpackKernel.of(
            unpack.Specialization(form, policy.rotate, pools.dtype), pools.device
        )
        for form in formats
    ]
    appends = append.AppendKernel.of(append.Specialization(pools.dtype, 16), pools.device)
    return {
        "append": bool(appends),
        "decode": decodes is not None,
        "pack": None not in packs,
        "unpack": None not in unpacks,
    }


@dataclass(frozen=True)
class Call:
    """Prompt of a forward pass, with the resulting logits.

    Attributes:
        prompt: a first turn, a later turn, or one token of an answer.
        logits: (vocabulary,) float32 logits of the last token, on the CPU.
    """

    prompt: Prompt
    logits: torch.Tensor

    @property
    def tokens(self) -> int:
        """Number of tokens in the prompt."""
        return self.prompt.tokens


@contextmanager
def record_calls(model: Any) -> Iterator[list[Call]]:
    """Record all first and later turns prefilled within the block, in the yielded list.

    Decode steps are not recorded, because a CUDA graph may run them; ``with_steps`` adds them.
    """
    calls: list[Call] = []

    def read_and_record(
        reader: Any, prompt: Prompt, *arguments: Any
    ) -> Iterator[torch.Tensor | None]:
        for logits in read_in_chunks(reader, prompt, *arguments):
            if reader is model and logits is not None:
                calls.append(Call(prompt, logits[0].float().cpu()))
            yield logits

    with patch.object(prefill_runner, "read_in_chunks", read_and_record):
        yield calls


def with_steps(calls: Sequence[Call], answers: Sequence[Sequence[int]]) -> list[Call]:
    """Return the calls, each followed by the decode steps of its answer.

    The last token of an answer has no step. Steps are added with the logits of the call before
    them.
    """
    passes = []
    for call, tokens in zip(calls, answers, strict=True):
        steps = [_step(call.prompt, index, token) for index, token in enumerate(tokens[:-1])]
        passes += [call, *(Call(step, call.logits) for step in steps)]
    return passes


def _step(prompt: Prompt, index: int, token: int) -> Prompt:
    ids = torch.full_like(prompt.inputs["input_ids"][:, :1], token)
    return Prompt(
        inputs={"input_ids": ids},
        positions=prompt.positions_after(index + 1)[..., index:],
        next_position=prompt.next_position + index + 1,
        modalities=torch.full(ids.shape, int(Modality.TEXT), dtype=torch.int8),
    )


@torch.inference_mode()
def replay(
    model: Any, calls: Sequence[Call], cache: Cache, prefill_chunk: int | None = None
) -> tuple[list[float], list[Call]]:
    """Repeat calls one after another with a cache; an OscarCache is prefilled as in pipelines.

    Args:
        model: transformers model.
        calls: calls to repeat.
        cache: empty cache.
        prefill_chunk: number of tokens per chunk of a prompt; None for no chunks.

    Returns:
        The seconds of each call, from media on the CPU to the sampled token, and the calls with
        their new logits.
    """
    seconds, repeated = [], []
    for call in calls:
        prompt = call.prompt
        _wait(prompt.positions.device)
        start = perf_counter()
        if isinstance(cache, OscarCache):
            logits = read_prompt(model, prompt, cache, prefill_chunk)
        else:
            logits = forward(model, prompt, cache)
        logits[0].argmax().item()
        seconds.append(perf_counter() - start)
        repeated.append(Call(prompt, logits[0].float().cpu()))
    return seconds, repeated


def tensors_on(device: torch.device, calls: Sequence[Call]) -> list[torch.Tensor]:
    """Return those inputs and positions of the calls that are on the given type of device."""
    values = [x for call in calls for x in (*call.prompt.inputs.values(), call.prompt.positions)]
    tensors = [x for x in values if isinstance(x, torch.Tensor)]
    return [tensor for tensor in tensors if tensor.device.type == device.type]


def join_calls(family: Any, calls: Sequence[Call]) -> Call:
    """Join all calls into one prompt of the full conversation, with the logits of the last call."""
    prompts = [call.prompt for call in calls]
    inputs: dict[str, Any] = {}
    for name in {name: None for prompt in prompts for name in prompt.inputs}:
        parts = [prompt.inputs[name] for prompt in prompts if name in prompt.inputs]
        ids = name == "input_ids"
        inputs[name] = torch.cat(parts, dim=-1) if ids else family.join_media(name, parts)
    conversation = Prompt(
        inputs=inputs,
        positions=torch.cat([prompt.positions for prompt in prompts], dim=-1),
        next_position=prompts[-1].next_position,
        modalities=torch.cat([prompt.modalities for prompt in prompts], dim=-1),
        layout=family.layout,
    )
    return Call(conversation, calls[-1].logits)


def difference(call: Call, expected: Call) -> float:
    """Return the relative difference of two calls' logits, |call - expected| / |expected|."""
    return float((call.logits - expected.logits).norm() / expected.logits.norm())


def step_ms(seconds: Sequence[float]) -> float:
    """Return the median time of decode steps in milliseconds.

    Args:
        seconds: times of the steps in seconds.
    """
    return 1e3 * median(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
