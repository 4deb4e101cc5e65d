"""OscarCache: a transformers Cache that stores keys and values in 2-bit pages by modality."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache

import oscar_mm.attention  # noqa: F401 - registers attention "oscar"
from oscar_mm.cache.attend import attend_stored
from oscar_mm.cache.layer import OscarLayer
from oscar_mm.cache.ledger import Ledger, Step
from oscar_mm.errors import InputError
from oscar_mm.memory import MemoryReport, measure
from oscar_mm.modality import PADDING, Modality
from oscar_mm.policy import KVPolicy
from oscar_mm.quant.balance import sigmas_of_model

_INCOMPLETE = (
    "an earlier forward pass did not reach layer {}: the cache is incomplete; reset() it and "
    "start again"
)


class KeyLength(int):
    """Length of the keys, as ``get_mask_sizes`` returns it, that knows its cache."""

    cache: OscarCache

    def __new__(cls, length: int, cache: OscarCache) -> KeyLength:
        """An int with the attribute ``cache``."""
        self = super().__new__(cls, length)
        self.cache = cache
        return self


class Chunk:
    """The new tokens of one layer in one forward pass, on their way through attention."""

    def __init__(self, layer: OscarLayer, step: Step) -> None:
        self._layer, self._step = layer, step

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """Attend over past and chunk, then store the chunk; see ``oscar_mm.cache.attend``."""
        layer, step = self._layer, self._step
        real = layer.cache.real_tokens(key.shape[2]) if step.real is not None else None
        layer.settle_basis(key, query, module, None if real is None else real.to(key.device))
        past = layer.cache.get_seq_length() - key.shape[2]
        if sliding_window is None or past + key.shape[2] <= sliding_window:
            output = attend_stored(layer, query, key, value, scaling, step)
        else:
            keys, values = layer.cache.with_past(layer, step, key, value)
            visible = layer.cache.window_mask(key.shape[2], sliding_window).to(key.device)
            output = scaled_dot_product_attention(
                query, keys, values, attn_mask=visible, scale=scaling, enable_gqa=True
            ).nan_to_num()  # a query that is padding sees nothing
        layer.append(key, value, step)
        return output


class OscarCache(Cache):
    """Keys and values in pages by modality, packed as a ``KVPolicy`` says.

    A drop-in for any decoder of transformers::

        cache = OscarCache("compact")
        model.generate(**inputs, past_key_values=cache)

    With attention "oscar" (``model.set_attn_implementation("oscar")``) the past is read from its
    pages; with any other implementation it is unpacked for each layer in turn, to the same result.
    A prompt's attention is exact in both: its keys and values are packed after their layer's
    attention is done. Tokens of a later chunk see the packed past.

    The cache learns of padding from attention "oscar"; with other implementations, and to store
    images, video and audio in streams of their own, call ``expect`` before a prompt.

    Args:
        policy: a KVPolicy or a preset's name.
        model: optional; lets query-key balancing read the QK-norm weights with any attention
            implementation (attention "oscar" finds them by itself).
    """

    def __init__(
        self, policy: str | KVPolicy = "compact", *, model: torch.nn.Module | None = None
    ) -> None:
        super().__init__(layers=[])
        self.policy = KVPolicy.of(policy)
        self.ledger = Ledger(self.policy)
        self._sigmas = sigmas_of_model(model) if model is not None else {}
        self._expected: np.ndarray | None = None
        self._packed_attention = False
        self._padding: torch.Tensor | None = None

    def expect(
        self, modalities: torch.Tensor | None = None, *, attention_mask: torch.Tensor | None = None
    ) -> None:
        """Tell the cache what the next tokens are; those after them are text.

        Args:
            modalities: (batch, tokens): 0 text, 1 image, 2 video, 3 audio, -1 padding (see
                ``oscar_mm.modality.token_modalities``).
            attention_mask: (batch, tokens), 0 for padding; alone, all other tokens are text.

        Raises:
            InputError: shapes or ids that cannot be.
        """
        if modalities is None and attention_mask is None:
            raise InputError("expect: give modalities, attention_mask or both")
        if modalities is None:
            modalities = torch.zeros_like(attention_mask, dtype=torch.int8)
        ids = modalities.detach().to("cpu").numpy()
        if ids.ndim != 2 or not set(np.unique(ids).tolist()) <= {PADDING, *Modality}:
            raise InputError(
                "expect: modalities must be (batch, tokens) of 0 text, 1 image, 2 video, 3 audio, "
                f"-1 padding, not {tuple(ids.shape)} of {np.unique(ids).tolist()[:8]}"
            )
        ids = ids.astype(np.int8)
        if attention_mask is not None:
            if attention_mask.shape != modalities.shape:
                raise InputError(
                    f"expect: attention_mask {tuple(attention_mask.shape)} and modalities "
                    f"{tuple(ids.shape)} must have one shape: that of the new tokens"
                )
            ids[attention_mask.to("cpu").numpy() == 0] = PADDING
        self._expected = ids

    def attend_packed(self, padding: torch.Tensor | None) -> None:
        """Attention "oscar" announces a forward pass: (batch, tokens) bool, False for padding."""
        self._packed_attention = True
        self._padding = None if padding is None else padding.to("cpu")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a layer's new keys and values, (batch, KV heads, tokens, head_dim) after RoPE.

        Returns:
            with attention "oscar" the new tokens, marked for it; else past and new tokens.
        """
        while len(self.layers) <= layer_idx:
            self.layers.append(OscarLayer(self, len(self.layers)))
        layer = self.layers[layer_idx]
        if not layer.is_initialized:
            layer.lazy_initialization(key_states, value_states)
            layer.sigma = self._sigmas.get(layer_idx)
        step = self._step_for(layer, key_states)
        if self._packed_attention:
            # A view, so that no stored tensor leads back to this layer.
            key_states = key_states.view_as(key_states)
            key_states.oscar_chunk = Chunk(layer, step)
            return key_states, value_states
        layer.settle_basis(key_states)
        keys, values = self.with_past(layer, step, key_states, value_states)
        layer.append(key_states, value_states, step)
        return keys, values

    def _step_for(self, layer: OscarLayer, key_states: torch.Tensor) -> Step:
        """The step of this forward pass: made by the first layer, carried out by all."""
        ledger = self.ledger
        if layer.waits:
            raise RuntimeError(_INCOMPLETE.format(layer.index))
        if layer.steps == ledger.steps:
            behind = [
                one.index for one in self.layers if one.is_initialized and one.steps < ledger.steps
            ]
            if behind:
                raise RuntimeError(_INCOMPLETE.format(behind[0]))
            batch, _, tokens, _ = key_states.shape
            if ledger.sequences and len(ledger.sequences) != batch:
                raise InputError(
                    f"the cache holds {len(ledger.sequences)} sequences, the new keys {batch}"
                )
            ledger.advance(self._modalities(batch, tokens))
        elif layer.steps != ledger.steps - 1:
            raise RuntimeError(_INCOMPLETE.format(layer.index))
        layer.waits = True
        return ledger.last

    def _modalities(self, batch: int, tokens: int) -> np.ndarray:
        """(batch, tokens) int8 of the coming chunk, from what was expected and the mask."""
        ids = np.zeros((batch, tokens), dtype=np.int8)
        if self._expected is not None:
            rows, known = self._expected.shape
            if known < tokens or batch % rows:
                raise InputError(
                    f"expect() announced ({rows}, {known}) tokens, but ({batch}, {tokens}) came"
                )
            # Beam search repeats each prompt.
            ids = np.repeat(self._expected[:, :tokens], batch // rows, axis=0)
            self._expected = self._expected[:, tokens:] if known > tokens else None
        elif self._padding is None and not self._packed_attention and batch > 1 and tokens > 1:
            warnings.warn(
                "OscarCache: a batch without expect(attention_mask=...): if it has padding, that "
                "is stored too. Call cache.expect, or use attention 'oscar'",
                stacklevel=4,
            )
        if self._padding is not None:
            ids[~self._padding.numpy().astype(bool)] = PADDING
        return ids

    def real_tokens(self, count: int) -> torch.Tensor:
        """(batch, count) bool on the CPU: which of the last ``count`` tokens are no padding."""
        rows = [sequence.real_tokens(count) for sequence in self.ledger.sequences]
        return torch.from_numpy(np.stack(rows))

    def with_past(
        self, layer: OscarLayer, step: Step, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Unpacked past and new tokens, (batch, KV heads, length, head_dim) each."""
        past = self.ledger.length - keys.shape[2]
        if not past:
            return keys, values
        unpacked = layer.unpacked(step.past, past)
        return torch.cat([unpacked[0], keys], dim=2), torch.cat([unpacked[1], values], dim=2)

    def window_mask(self, queries: int, window: int) -> torch.Tensor:
        """(batch, 1, queries, length) bool: causal, sliding, without padding."""
        length = self.ledger.length
        query = torch.arange(length - queries, length)[:, None]
        key = torch.arange(length)
        visible = (key <= query) & (key > query - window)
        return visible & self.real_tokens(length)[:, None, None]

    def unpacked(
        self, layer_idx: int, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a layer holds, in sequence order: (batch, KV heads, length, head_dim) each.

        In the model's coordinates and, if no other is asked for, dtype; 0 where a token is padding.
        """
        return self.layers[layer_idx].unpacked(self.ledger.sequences, self.ledger.length, dtype)

    def memory(self) -> MemoryReport:
        """Bytes held, by modality and by kind."""
        return measure(self)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of a row, padding included."""
        return self.ledger.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """(length of the keys in the coming forward pass, 0)."""
        self._packed_attention, self._padding = False, None
        return KeyLength(self.ledger.length + query_length, self), 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: unbounded."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens of every row (the sign is transformers').

        Tokens in 16 bit are dropped; a packed page that is cut keeps its codes and counts fewer
        tokens. Nothing is quantized again.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): give minus the number of tokens to remove, "
                f"e.g. crop({tokens_to_remove - self.get_seq_length()}) to keep {tokens_to_remove}"
            )
        self.ledger.crop(-tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Make row i what row ``beam_idx[i]`` was; beams share the slots of their history."""
        self.ledger.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times; the copies share their slots."""
        rows = range(len(self.ledger.sequences))
        self.ledger.select([row for row in rows for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows at these indices, or where a bool mask is true."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        self.ledger.select(indices.tolist())

    def reset(self) -> None:
        """Forget everything; pools and balancing are given up too."""
        self.ledger = Ledger(self.policy)
        self.layers.clear()
        self._expected = self._padding = None
        self._packed_attention = False

    def offload(self, *args: Any, **kwargs: Any) -> None:
        """Not supported: pages are small enough to stay."""
        raise NotImplementedError("OscarCache.offload: pages cannot be offloaded")

    prefetch = offload
