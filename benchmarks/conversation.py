"""Conversations with a full-size model of random weights, and the same forward passes again."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import DynamicCache

from benchmarks.allocator import allocated, held
from benchmarks.random_model import build
from benchmarks.released import Released
from benchmarks.replay import Call, difference, joined, recorded, replay, step_ms, with_steps
from oscar_mm import OscarCache, OscarOmniPipeline, OscarVLPipeline
from oscar_mm.attention import IMPLEMENTATION
from oscar_mm.chat.chat import Chat
from oscar_mm.media.mono import RATE
from oscar_mm.modality import Modality
from oscar_mm.moe_switch import IMPLEMENTATION as EXPERTS
from oscar_mm.ops import append, decode, pack, unpack
from oscar_mm.pipelines.media import Medium
from oscar_mm.pipelines.pipeline import Pipeline
from oscar_mm.quant.quantize import Recipe
from tests.tiny import TEXT

POLICY = "compact"
BATCHES = (1, 2, 4, 8, 16)
"""In which implementations of experts are compared."""


@dataclass(frozen=True)
class Load:
    """What a conversation consists of.

    Attributes:
        picture: width and height of each.
        checked: tokens of the prompt whose kept cache is compared with a fresh one.
        text: tokens of the text of a later turn, about.
        answer: tokens of an answer.
        steps: tokens more of a long answer.
        audio_share: of the tokens of a first prompt, where the model hears.
        chunk: tokens at a time of a prompt that is read in chunks.
    """

    picture: tuple[int, int] = (1280, 960)
    checked: int = 8192
    text: int = 1000
    answer: int = 7
    steps: int = 40
    audio_share: float = 0.25
    chunk: int = 8192


TINY = Load((160, 128), checked=300, text=40, answer=3, steps=2, chunk=128)


class Bench:
    """One model and its pipelines, which share the weights.

    Args:
        released: the model.
        load: of its conversations.
        device: where it runs.
    """

    def __init__(self, released: Released, load: Load, device: torch.device) -> None:
        self.load, self.device = load, device
        start = perf_counter()
        model, self.processor = build(released, device, torch.bfloat16)
        kind = OscarOmniPipeline if released.audio else OscarVLPipeline
        self.pipe = kind(model, processor=self.processor, policy=POLICY)
        self.exact = kind(model, processor=self.processor, policy="bf16")
        more = {"policy": POLICY, "prefill_chunk": load.chunk}
        self.chunked = kind(model, processor=self.processor, **more)
        self.numbers = np.random.default_rng(0)
        self.made = {
            "source": released.source,
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "weights": sum(weight.nbytes for weight in model.parameters()),
            "build_s": perf_counter() - start,
        }

    def media(self, tokens: int) -> dict[str, list[Any]]:
        """Pictures, and a recording where the model hears, that take about so many tokens."""
        media: dict[str, list[Any]] = {}
        if Modality.AUDIO in self.pipe.family.reads:
            seconds = int(tokens * self.load.audio_share / 13)
            noise = self.numbers.standard_normal(seconds * RATE)
            media["audio"] = [((0.1 * noise).astype(np.float32), RATE)]
            tokens -= 13 * seconds
        picture = self.picture()
        each = self.pipe.family.least_tokens(Medium(Modality.IMAGE, picture, "")) + 2
        rest = max(0, tokens // each - 1)
        return media | {"images": [picture, *(self.picture() for _ in range(rest))]}

    def picture(self) -> Image.Image:
        width, height = self.load.picture
        pixels = self.numbers.integers(0, 256, (height, width, 3), dtype=np.uint8)
        return Image.fromarray(pixels)

    def text(self) -> str:
        """About as many tokens as a later turn is to have."""
        tokenizer = self.processor.tokenizer
        ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
        times = -(-self.load.text // len(ids))
        return tokenizer.decode((ids * times)[: self.load.text])

    def ask(self, chat: Chat, prompt: str = "What is it?", **media: list[Any]) -> Any:
        return chat.ask(prompt, **media, max_new_tokens=self.load.answer, temperature=0)

    def warm_up(self) -> None:
        """Compiles and checks the kernels, and makes the workspaces of libraries."""
        with self.pipe.chat() as chat:
            self.ask(chat, images=[self.picture()])
            self.ask(chat, self.text())

    def conversation(self, context: int, *, whole: bool) -> dict[str, Any]:
        """One row: a chat, and its forward passes again with each cache.

        Args:
            context: tokens of the first prompt, about.
            whole: also save, load and forget, and repeat everything a second time; else also read
                the first prompt in chunks.
        """
        before = allocated(self.device)
        media = self.media(context - 64)
        with self.pipe.chat() as chat, recorded(self.pipe.model) as calls:
            first = self.ask(chat, **media)
            row = self.made | {
                "context": context,
                "prompt_tokens": first.prompt_tokens,
                "images": len(media["images"]),
                "audio_s": sum(len(samples) / rate for samples, rate in media.get("audio", [])),
                "request_s": first.timings.prefill_s,
                "memory": first.memory.to_dict(),
                "held": held(before, allocated(self.device), calls, self.device),
                "kernels": kernels_used(self.pipe),
            }
            answers = [
                first,
                self.ask(chat, self.text(), images=[self.picture()]),
                self.ask(chat, self.text()),
            ]
            row["pipeline_step_ms"] = self._step_ms(chat)
            if whole:
                row |= self._saved(chat) | self._forgotten(chat)
        played = with_steps(calls[:3], [answer.token_ids for answer in answers])
        row["ms"] = self._timed(played, rounds=2 if whole else 1)
        if whole:
            row["experts"] = self._experts(played[1])
        else:
            row["chunked"] = self._in_chunks(media)
        return row

    def _in_chunks(self, media: dict[str, list[Any]]) -> dict[str, Any]:
        """The first turn with ``prefill_chunk``: memory of its answer, and time of its prefill."""
        before = allocated(self.device)
        with self.chunked.chat() as chat, recorded(self.pipe.model) as calls:
            self.ask(chat, **media)
            found = held(before, allocated(self.device), calls, self.device)
        chunk = self.load.chunk
        [seconds], _ = replay(self.pipe.model, calls, OscarCache(POLICY), chunk)
        return {"chunk": chunk, "held": found, "prefill_ms": 1e3 * seconds}

    def kept(self) -> dict[str, Any]:
        """Logits of a later turn on a kept cache against those of the whole conversation."""
        media = self.media(self.load.checked)
        with self.exact.chat() as chat, recorded(self.exact.model) as calls:
            first = self.ask(chat, **media)
            self.ask(chat, self.text(), images=[self.picture()])
        calls = [*with_steps(calls[:1], [first.token_ids]), calls[1]]
        with self._attention("sdpa"):
            fresh = replay(self.pipe.model, [joined(self.pipe.family, calls)], DynamicCache())[1]
            plain = replay(self.pipe.model, calls, DynamicCache())[1]
        return {
            "tokens": sum(call.tokens for call in calls),
            "difference": difference(calls[-1], fresh[-1]),
            "dynamic": difference(plain[-1], fresh[-1]),
            "same_token": int(calls[-1].logits.argmax()) == int(fresh[-1].logits.argmax()),
        }

    def _experts(self, call: Call) -> dict[str, Any]:
        """Milliseconds of a decode step by batch and implementation of the experts."""
        model, found = self.pipe.model, {}
        chosen = model.get_experts_implementation()
        for batch in BATCHES if EXPERTS in chosen.values() else ():
            inputs = {"input_ids": call.prompt.inputs["input_ids"].expand(batch, -1)}
            positions = call.prompt.positions.expand(-1, batch, -1)
            several = Call(replace(call.prompt, inputs=inputs, positions=positions), call.logits)
            for name in ("grouped_mm", "batched_mm"):
                model.set_experts_implementation(name)
                cache = DynamicCache()
                seconds, _ = replay(model, [several] * self.load.answer, cache)
                found[f"{name} x {batch}"] = step_ms(seconds[1:])
        model.set_experts_implementation(chosen)
        return found

    def _timed(self, calls: Sequence[Call], rounds: int) -> dict[str, dict[str, float]]:
        """Milliseconds of the parts of a conversation, by cache."""
        turn = self.load.answer
        steps = [index for index in range(len(calls)) if index % turn]
        found: dict[str, dict[str, float]] = {}
        for name, attention in (("oscar", IMPLEMENTATION), ("dynamic", "sdpa")):
            with self._attention(attention):
                for _ in range(rounds):
                    cache = OscarCache(POLICY) if name == "oscar" else DynamicCache()
                    seconds, _ = replay(self.pipe.model, calls, cache)
                    del cache
            found[name] = {
                "prefill": 1e3 * seconds[0],
                "step": step_ms([seconds[index] for index in steps]),
                "turn_picture": 1e3 * seconds[turn],
                "turn_text": 1e3 * seconds[2 * turn],
            }
        return found | {
            "tokens": {"turn_picture": calls[turn].tokens, "turn_text": calls[2 * turn].tokens}
        }

    def _step_ms(self, chat: Chat) -> float:
        """Of a long answer: what an answer takes longer that has so many more tokens."""
        spent = []
        for tokens in (self.load.answer, self.load.answer + self.load.steps):
            with chat.fork() as twin:
                spent.append(twin.ask("?", max_new_tokens=tokens, temperature=0).timings.decode_s)
        return 1e3 * (spent[1] - spent[0]) / self.load.steps

    def _saved(self, chat: Chat) -> dict[str, Any]:
        """Save, load, and the next answer of both."""
        report = chat.memory
        _ = self.pipe.fingerprint  # is computed once for a model
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "chat.safetensors"
            start = perf_counter()
            chat.save(path)
            saved = perf_counter()
            loaded = self.pipe.load_chat(path)
            done = perf_counter()
            size = path.stat().st_size
        with loaded:
            answers = [self.ask(one).token_ids for one in (loaded, chat)]
        return {
            "saved_bytes": size,
            "saved_ratio": report.bf16_bytes / size,
            "save_s": saved - start,
            "load_s": done - saved,
            "same_after_load": answers[0] == answers[1],
        }

    def _forgotten(self, chat: Chat) -> dict[str, Any]:
        """Forget the first turn's pictures, one after the other, and answer once more."""
        pictures = [one for one in chat.segments if not one.turn and one.modality is Modality.IMAGE]
        before, start = chat.memory.kv_bytes, perf_counter()
        for picture in pictures:
            chat.forget(picture.index)
        spent = perf_counter() - start
        freed = before - chat.memory.kv_bytes
        self.ask(chat)
        return {
            "forget_ms": 1e3 * spent / len(pictures),
            "forgotten_bytes": sum(picture.bytes for picture in pictures),
            "freed_bytes": freed,
        }

    @contextmanager
    def _attention(self, name: str) -> Iterator[None]:
        """The decoder's attention, inside."""
        self.pipe.model.set_attn_implementation({"text_config": name})
        try:
            yield
        finally:
            self.pipe.model.set_attn_implementation({"text_config": IMPLEMENTATION})


def kernels_used(pipe: Pipeline) -> dict[str, bool]:
    """Which operations of decode steps are done by their CUDA kernels on the pages of a layer."""
    pools, policy = pipe.store.layers[0], pipe.policy
    config = pipe.model.config.get_text_config(decoder=True)
    group = config.num_attention_heads // config.num_key_value_heads
    formats = [pools.formats[bits] for bits in sorted(pools.formats)]
    decodes = decode.decode_kernel(
        formats, pools.head_dim, policy.rotate, pools.dtype, group, pools.device
    )
    packs = [
        pack.PackKernel.of(pack.Specialization(Recipe.of(one, policy), pools.dtype), pools.device)
        for one in formats
    ]
    unpacks = [
        unpack.UnpackKernel.of(unpack.Specialization(one, policy.rotate, pools.dtype), pools.device)
        for one in formats
    ]
    appends = append.AppendKernel.of(append.Specialization(pools.dtype, 16), pools.device)
    return {
        "append": bool(appends),
        "decode": decodes is not None,
        "pack": None not in packs,
        "unpack": None not in unpacks,
    }
