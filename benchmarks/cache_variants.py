"""Cache variants: decode steps with transformers' caches and ours, filled with random data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from transformers import Cache, CompileConfig, DynamicCache, QuantizedCache, StaticCache

from benchmarks.conversation import POLICY, TINY, Bench, Sizes
from benchmarks.random_model import RANDOM_MODELS, text_and_images
from oscar_mm import KVPolicy, OscarCache
from oscar_mm.admission.capacity import ModelShape
from oscar_mm.attention import IMPLEMENTATION
from oscar_mm.cache.cache import as_argument
from oscar_mm.cache.kv_manager import KVCacheManager
from oscar_mm.cache.page_store import PageStore
from oscar_mm.cache.states import StateShape, kinds_of_states
from oscar_mm.compare.methods import BACKENDS, not_installed, stored_bytes
from oscar_mm.fast_decode.graph_runner import GraphRunner, capture_cuda_graph
from oscar_mm.fast_decode.row_adapters import AdaptedLinear, RowAdapters
from oscar_mm.modality import Modality
from oscar_mm.policy import Bits

MAX_POSITIONS = 1 << 19
_TOWERS = ("visual", "vision", "audio", "projector")
_PIECE_ELEMENTS = 1 << 26
"""Number of elements of the random keys of a piece of a cache: 128 MB in bfloat16."""
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function that returns the logits after one more token per row, with a ``GraphRunner``'s
arguments."""
_SEED = 0
_ROUND = 512
"""Granularity, in tokens, of the pieces that fill an OscarCache. A piece of a single row is large
enough to fix the scale factors."""


class Decoder:
    """Decoder of a released model with random weights.

    Args:
        name: key of ``RANDOM_MODELS``.
        device: device of the model.
        tiny: whether to use a small version of the model.

    Attributes:
        model: transformers model; its kernels have been compiled and checked.
        pipe: pipeline of the model, without chats or requests.
        config: configuration of the decoder.
        axes: leading axes of the position ids.
        attentions: the attention modules, layer by layer.
        with_states: layer index -> type of each layer that keeps a state instead.
        resident: bytes of all weights, including those of towers and adapters.
    """

    def __init__(self, name: str, device: torch.device, *, tiny: bool) -> None:
        released = RANDOM_MODELS[name].with_positions(MAX_POSITIONS)
        bench = Bench(released.tiny() if tiny else released, TINY if tiny else Sizes(), device)
        bench.warm_up()
        bench.pipe.store.trim()  # Free the pools of the chat that warmed up the model.
        self.name, self.device, self.model = name, device, bench.pipe.model
        self.pipe = bench.pipe.with_policy(POLICY)  # Without the steps captured in the warm-up.
        self.config = self.model.config.get_text_config(decoder=True)
        self.axes = () if released.family == "llava_next" else (4,)
        self.attentions = [
            module for module in self.model.get_decoder().modules() if hasattr(module, "k_proj")
        ]
        self.with_states = kinds_of_states(self.config)
        self._adapter_bytes = sum(
            module.down.nbytes + module.up.nbytes
            for module in self.model.modules()
            if isinstance(module, AdaptedLinear)
        )
        self.resident = bench.facts["weights"] + self._adapter_bytes

    def weights(self, rows: int) -> float:
        """Return the bytes of weights that a step of ``rows`` rows reads.

        For a mixture of experts, this counts the expected number of different experts.
        """
        total = float(self._adapter_bytes)
        for name, weight in self.model.named_parameters():
            if "embed_tokens" in name or any(tower in name for tower in _TOWERS):
                continue
            share = 1.0
            if ".experts." in name:
                most = self.config.num_experts
                share = 1 - (1 - self.config.num_experts_per_tok / most) ** rows
            total += share * weight.nbytes
        return total

    def adapters(self, rows: int) -> list[str] | None:
        """Return the adapter of each of ``rows`` rows, in turn; None if the model has none."""
        own = RowAdapters.of(self.model)
        return None if own is None else list(islice(cycle(own.digests), rows))

    @property
    def token_bytes(self) -> int:
        """Return the bytes of a token's keys and values in 16-bit precision, in all layers."""
        config = self.config
        return 4 * len(self.attentions) * config.num_key_value_heads * config.head_dim

    @property
    def state_bytes(self) -> int:
        """Return the bytes of a row's states, in all layers."""
        return len(self.with_states) * self._state_shape.bytes if self.with_states else 0

    @property
    def _state_shape(self) -> StateShape:
        return StateShape.of(self.config, torch.bfloat16)

    def fill_states(self, cache: Cache, rows: int) -> None:
        """Store random states in a cache of transformers or ours."""
        generator = torch.Generator(self.device).manual_seed(_SEED)
        for index in self.with_states:
            convolution, recurrent = (
                torch.randn(rows, *shape, generator=generator, device=self.device)
                for shape in self._state_shape[:2]
            )
            cache.update_conv_state(convolution.to(torch.bfloat16), index)
            cache.update_recurrent_state(recurrent, index)

    def states(
        self, rows: int, tokens: int, generator: torch.Generator, heads: int | None = None
    ) -> torch.Tensor:
        """Return random bfloat16 keys or values of shape (rows, heads, tokens, head_dim).

        ``heads`` is the number of KV heads by default.
        """
        size = (rows, heads or self.config.num_key_value_heads, tokens, self.config.head_dim)
        return torch.randn(size, generator=generator, device=self.device, dtype=torch.bfloat16)

    def pieces(self, rows: int, tokens: int, multiple: int) -> Iterator[tuple[int, int]]:
        """Yield the start and end token index of each piece that fills a cache.

        Args:
            rows: number of rows in the batch.
            tokens: number of tokens per row.
            multiple: granularity of all pieces except the last, in tokens.
        """
        row = rows * self.config.num_key_value_heads * self.config.head_dim
        piece = max(1, _PIECE_ELEMENTS // (row * multiple)) * multiple
        for start in range(0, tokens, piece):
            yield start, min(tokens, start + piece)


@dataclass
class FilledCache:
    """Filled cache and the function that runs its decode steps.

    Attributes:
        step: function that runs one step.
        kv_bytes: function that returns the size that the cache reports, in bytes.
        captures: list with one entry for each captured graph.
        more_bytes: function that returns how many bytes a step moves besides weights and
            ``kv_bytes``: those of states that it writes in place.
        ahead: function that launches the next step before the host has its tokens, as
            ``GraphRunner.ahead`` does; None if a step must wait for the tokens.
    """

    step: Step
    kv_bytes: Callable[[], int]
    captures: list[str] = field(default_factory=list)
    ahead: Callable[[torch.Tensor, torch.Tensor], None] | None = None
    more_bytes: Callable[[], int] = int


class CacheVariant(ABC):
    """Kind of cache, and the way in which decode steps run with it.

    Attributes:
        title: name in tables.
        attention: attention implementation of the decoder.
        inference: whether steps run in inference mode rather than only without gradients.
    """

    title: str
    attention = "sdpa"
    inference = True

    def missing(self) -> str | None:
        """Return the reason why the variant cannot run here, or None if it can."""
        return None

    @abstractmethod
    def fill(self, decoder: Decoder, rows: int, tokens: int, steps: int) -> FilledCache:
        """Return a cache filled with random tokens in each row.

        Args:
            decoder: decoder that runs the steps.
            rows: number of rows in the batch.
            tokens: number of tokens per row.
            steps: number of further tokens per row to allocate memory for.
        """

    def row_bytes(self, decoder: Decoder, tokens: int, steps: int) -> int:
        """Return the size of one row's keys and values at the end of all steps, in bytes."""
        return decoder.token_bytes * (tokens + steps)

    def release(self) -> None:  # noqa: B027 - most variants have nothing to free
        """Free memory that is still in use after a run; most variants have nothing to free."""


class Dynamic(CacheVariant):
    """Variant that uses transformers' DynamicCache."""

    title = "DynamicCache"

    def fill(self, decoder: Decoder, rows: int, tokens: int, steps: int) -> FilledCache:
        cache = DynamicCache(config=decoder.config)
        first = _states(decoder, rows, tokens)
        for index, layer in enumerate(cache.layers):
            if index in decoder.with_states:
                continue
            layer.lazy_initialization(*(side[:, :, :0] for side in first))
            # update() would temporarily need a second copy.
            layer.keys, layer.values = (side.clone() if index else side for side in first)
        decoder.fill_states(cache, rows)
        step = _transformers_step(decoder, cache, decoder.model, rows, tokens)
        states = rows * decoder.state_bytes
        return FilledCache(step, lambda: _plain_bytes(cache) + states, more_bytes=lambda: states)


class Static(CacheVariant):
    """Variant that uses transformers' StaticCache with a compiled model, as ``generate`` does."""

    title = "StaticCache, compiled"
    inference = False

    def fill(self, decoder: Decoder, rows: int, tokens: int, steps: int) -> FilledCache:
        cache = StaticCache(config=decoder.config, max_cache_len=tokens + steps)
        states = _states(decoder, rows, tokens)
        for layer in cache.layers:
            layer.lazy_initialization(*states)
            for side, values in zip((layer.keys, layer.values), states, strict=True):
                side[:, :, :tokens] = values
            layer.cumulative_length.fill_(tokens)
        on_gpu = decoder.device.type == "cuda"
        # A tiny run must not need a C++ compiler.
        config = CompileConfig() if on_gpu else CompileConfig(backend="eager", mode=None)
        call = decoder.model.get_compiled_call(config)
        step = _transformers_step(decoder, cache, call, rows, tokens)
        return FilledCache(step, lambda: _plain_bytes(cache))

    def release(self) -> None:
        """Drop the compiled graphs to free their memory."""
        torch.compiler.reset()


class Quantized(CacheVariant):
    """Variant that uses transformers' QuantizedCache.

    Args:
        backend: "hqq" or "quanto".
    """

    def __init__(self, backend: str) -> None:
        self.backend, self.title = backend, f"QuantizedCache, {backend} 2 bit"

    def missing(self) -> str | None:
        return not_installed(self.backend)

    def fill(self, decoder: Decoder, rows: int, tokens: int, steps: int) -> FilledCache:
        axis = BACKENDS[self.backend][2]
        cache = QuantizedCache(
            self.backend, decoder.config, nbits=2, axis_key=axis, axis_value=axis
        )
        states = _states(decoder, rows, tokens)
        for layer in cache.layers:
            layer.update(*states)

        def kv_bytes() -> int:
            sides = (
                side
                for layer in cache.layers
                for side in (layer._quantized_keys, layer._quantized_values)
            )
            return sum(map(stored_bytes, sides)) + _plain_bytes(cache)

        return FilledCache(
            _transformers_step(decoder, cache, decoder.model, rows, tokens), kv_bytes
        )


class Oscar(CacheVariant):
    """Variant that uses our cache, ``OscarCache``.

    Args:
        policy: name of a preset.
        graph: whether steps run as captured graphs; on a CPU a graph is the function itself.
    """

    attention = IMPLEMENTATION

    def __init__(self, policy: str, *, graph: bool) -> None:
        self.policy, self.graph = policy, graph
        self.title = f"{policy}, {'graph' if graph else 'eager'}"

    def fill(self, decoder: Decoder, rows: int, tokens: int, steps: int) -> FilledCache:
        cache = OscarCache(self.policy, model=decoder.model)
        self.store_prompt(cache, decoder, rows, tokens, self.slots(tokens, steps))
        return self.decoded(cache, decoder)

    def decoded(self, cache: OscarCache, decoder: Decoder) -> FilledCache:
        """Return a cache that is already filled, together with its decode step."""
        captures: list[str] = []

        def record(function: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
            on_gpu = device.type == "cuda"
            replay = capture_cuda_graph(function, device) if on_gpu else function
            captures.append("graph" if on_gpu else "the same function again")
            return replay

        how = record if self.graph else None
        rows = cache.batch_size
        steps = GraphRunner(decoder.model, cache, rows, decoder.axes, decoder.device, how)
        steps.place([cache.get_seq_length()] * rows, decoder.adapters(rows))
        states = rows * decoder.state_bytes
        return FilledCache(
            *(steps, lambda: cache.memory().kv_bytes, captures, steps.ahead),
            lambda: 0 if cache.spares else states,
        )

    def row_bytes(self, decoder: Decoder, tokens: int, steps: int) -> int:
        config, policy = decoder.config, KVPolicy.of(self.policy)
        sizes = ModelShape.of(config, 0).slot_bytes(policy)
        row = sum(sizes[bits] * count for bits, count in self.slots(tokens, steps).items())
        return len(decoder.attentions) * row + (1 + self.graph) * decoder.state_bytes

    def slots(self, tokens: int, steps: int) -> dict[Bits, int]:
        """Return the number of slots, by bits, that a row needs for a prompt and an answer.

        The numbers come from a dry run of a KV cache manager.
        """
        kv_manager = KVCacheManager(PageStore(self.policy))
        prompt = text_and_images(tokens).to(torch.int8)[None].numpy()
        starts = range(0, tokens, _ROUND)
        chunks = [prompt[:, start : start + _ROUND] for start in starts]
        chunks += [np.full((1, 1), int(Modality.TEXT), dtype=np.int8)] * steps
        most = dict.fromkeys(kv_manager.allocators, 0)
        for chunk in chunks:
            kv_manager.advance(chunk)
            most = {
                bits: max(most[bits], slots.used) for bits, slots in kv_manager.allocators.items()
            }
        return most

    def store_prompt(
        self,
        cache: OscarCache,
        decoder: Decoder,
        rows: int,
        tokens: int,
        slots: dict[Bits, int],
        more: int = 0,
    ) -> None:
        """Fill an empty cache with random tokens.

        Args:
            cache: cache with this variant's policy.
            decoder: decoder whose shapes and attention modules are used.
            rows: number of rows in the batch.
            tokens: number of tokens per row.
            slots: number of slots that a row needs, by bits; pools get their final size at once, so
                that they never grow.
            more: number of further rows to allocate memory for.
        """
        for bits, count in slots.items():
            allocator = cache.store.allocators[bits]
            allocator.release(reversed(allocator.allocate((rows + more) * count)))
        generator = torch.Generator(decoder.device).manual_seed(_SEED)
        modalities = text_and_images(tokens)
        decoder.fill_states(cache, rows)
        for start, stop in decoder.pieces(rows, tokens, _ROUND):
            cache.expect(modalities[start:stop].expand(rows, -1))
            cache.attend_packed(None)
            keys, values = (decoder.states(rows, stop - start, generator) for _ in range(2))
            for index in (attention.layer_idx for attention in decoder.attentions):
                cache.update(keys, values, index)
                cache.layers[index].append(keys, values, cache.step)


VARIANTS: dict[str, CacheVariant] = {
    "dynamic": Dynamic(),
    "static-compiled": Static(),
    "quantized-hqq": Quantized("hqq"),
    "quantized-quanto": Quantized("quanto"),
    "bf16-eager": Oscar("bf16", graph=False),
    "bf16-graph": Oscar("bf16", graph=True),
    "compact-eager": Oscar("compact", graph=False),
    "compact-graph": Oscar("compact", graph=True),
    "standard-graph": Oscar("standard", graph=True),
}


def _transformers_step(
    decoder: Decoder, cache: Cache, call: Callable, rows: int, tokens: int
) -> Step:
    """Return the step function of a transformers cache that contains ``tokens`` tokens per row."""
    axes = decoder.axes
    position = torch.full((rows,), tokens, device=decoder.device)

    def step(tokens: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        nonlocal position
        positions = position.view(*[1] * len(axes), -1, 1).expand(*axes, -1, 1)
        position = position + 1
        inputs = {"input_ids": tokens[:, None], "position_ids": positions}
        return call(**inputs, **as_argument(cache), use_cache=True).logits[:, -1]

    return step


def _states(decoder: Decoder, rows: int, tokens: int) -> list[torch.Tensor]:
    """Return random keys and values, which are the same for all layers."""
    generator = torch.Generator(decoder.device).manual_seed(_SEED)
    return [decoder.states(rows, tokens, generator) for _ in range(2)]


def _plain_bytes(cache: Cache) -> int:
    return sum(x.keys.nbytes + x.values.nbytes for x in cache.layers if hasattr(x, "keys"))
