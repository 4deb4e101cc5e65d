"""OscarCache: a transformers Cache that stores keys and values in low-bit pages by modality."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import numpy as np
import torch
from transformers import Cache
from transformers.masking_utils import create_causal_mask

from oscar_mm.cache.block_table import SlotSet
from oscar_mm.cache.kv_manager import KVCacheManager, PendingModalities
from oscar_mm.cache.layer import OscarLayer, forked, layers_unstorable, pack_together
from oscar_mm.cache.memory import MemoryReport, measure
from oscar_mm.cache.page_store import PageStore
from oscar_mm.cache.paged_attention import KeyLength, LayerCall
from oscar_mm.cache.snapshot import Snapshot
from oscar_mm.cache.states import LinearLayer, Marks, StateRow, held_bytes, states_of
from oscar_mm.cache.step_plan import StepPlan
from oscar_mm.errors import InputError
from oscar_mm.modality import PADDING
from oscar_mm.pages.codecs.registry import codec_of
from oscar_mm.policy import DEFAULT, KVPolicy
from oscar_mm.quant.balance import sigmas_of_model
from oscar_mm.sizes import format_bytes
from oscar_mm.tensor_parallel import TPGroup
from oscar_mm.torch_modes import autocast_dtype, eager

_UNBALANCED = (
    "OscarCache: keys are stored without query-key balancing, because the cache was created "
    "without the model whose weights are needed; some models then give unusable answers. Create it "
    "with OscarCache(policy, model=model), or use a policy with balance=None"
)
_FORGET = (
    "forget: the states of linear-attention layers include these tokens, and no token can be "
    "removed from a state; undo() all turns since, crop to an earlier mark(), or start again "
    "without them"
)
_CROP = (
    "crop to {:,} tokens: linear-attention layers have copies of their states only at the marked "
    "lengths ({}); call mark() at each length to which the cache may be cropped"
)
_NO_WINDOW = (
    "crop to {:,} tokens: layers with sliding windows have only the windows of the marked lengths "
    "({}); call mark() at each length to which the cache may be cropped"
)
_TWO_STATES = (
    "layer {} has attention and a linear-attention state, but an OscarCache stores only one of "
    "them per layer: use transformers' DynamicCache for this model"
)

_USER = 5
"""Stack level of the caller of ``update`` for warnings in ``_take``, with frames of ``eager``."""
_ARGUMENT = "cache" if "cache" in signature(create_causal_mask).parameters else "past_key_values"


def as_argument(cache: Any) -> dict[str, Any]:
    """Return a cache as the keyword argument of models and ``generate``.

    The argument is called ``cache`` since transformers 5.24, and ``past_key_values`` in earlier
    versions.
    """
    return {_ARGUMENT: cache}


def cache_of(arguments: Mapping[str, Any]) -> Any:
    """Return the cache in a call's keyword arguments or a model's output; None if there is none."""
    return arguments.get(_ARGUMENT)


def balancing_of(model: torch.nn.Module, policy: KVPolicy) -> dict[int, torch.Tensor]:
    """Return a model's query-key balancing vectors (sigma) by layer index.

    The result is empty if the policy does not balance.

    Raises:
        InputError: if the policy does not fit a model that is divided among ranks.
    """
    TPGroup.of(model).check(policy)
    if not policy.balances:
        return {}
    return sigmas_of_model(model, centered=codec_of(policy).centers_keys(policy))


class OscarCache(Cache):
    """Cache with keys and values in pages by modality, packed according to a ``KVPolicy``.

    A drop-in cache for any decoder of transformers::

        cache = OscarCache("compact", model=model)
        model.generate(**inputs, **as_argument(cache))

    With attention "oscar" (``model.set_attn_implementation("oscar")``) the past is read from its
    pages; with any other implementation, it is unpacked for each layer in turn, with the same
    result. In both cases, the attention of a prompt is exact: its keys and values are packed after
    the attention of their layer. Tokens of a later chunk attend to the packed past. Layers with
    linear attention (Qwen3-Next, Qwen3.5, Jamba) keep their unmodified state in transformers' own
    layers; such a cache can be cropped only to the lengths at which ``mark`` was called.

    Attention "oscar" passes the padding on to the cache. With other implementations, or to store
    images, video and audio in separate streams, call ``expect`` before a prompt.

    Args:
        policy: a KVPolicy or a preset's name.
        model: model whose keys and values the cache will store; the query-key balancing vectors
            are computed from its weights. If omitted, keys are stored unbalanced, and the cache
            warns when it first packs any.
        store: page store to share with other caches of the same model and policy; by default, a new
            store.

    Raises:
        InputError: if the store has another policy, or the policy does not fit a model that is
            divided among ranks.
    """

    reads_windows = True
    """Whether attention to this cache takes the masks of ``oscar_mm.ops.window_mask``."""
    layers: list[Any]
    """OscarLayers for layers with attention and LinearLayers for layers with linear attention."""
    step: StepPlan | None
    """Plan of the latest forward pass; None before the first."""
    sigmas: Mapping[int, torch.Tensor | None] | None
    """Balancing vectors by layer index, for layers that have no keys yet; None if unknown."""
    spares: dict[int, LinearLayer]
    """Spare linear-attention layers by layer index, see ``StateRow``."""
    to_spares: bool
    """Whether the current step writes states to spare layers."""
    hidden: torch.Tensor | None
    """(1, hidden size) output of the decoder for the last token of a prompt, which the first draft
    reads; None if it is not known."""

    def __init__(
        self,
        policy: str | KVPolicy = DEFAULT,
        *,
        model: torch.nn.Module | None = None,
        store: PageStore | None = None,
    ) -> None:
        super().__init__(layers=[])
        self.policy = KVPolicy.of(policy)
        if store is not None and store.policy != self.policy:
            raise InputError(f"the cache has {self.policy}, but its store has {store.policy}")
        self._own_store, self.closed = store is None, False
        self.store = PageStore(self.policy) if store is None else store
        self.kv_manager = KVCacheManager(self.store)
        self.step = None
        self.sigmas = None if model is None else balancing_of(model, self.policy)
        self._expected = PendingModalities()
        self._warned = False
        self.spares, self.to_spares = {}, False
        self.hidden = None
        self._idle: frozenset[int] = frozenset()
        """Rows without a new token in the current step."""
        # Whether layers on a GPU have stored a prompt or pages since the last check.
        self.unchecked = False

    def expect(
        self, modalities: torch.Tensor | None = None, *, attention_mask: torch.Tensor | None = None
    ) -> None:
        """Announce the modalities of the next tokens; tokens after these are text.

        Args:
            modalities: (batch, tokens): 0 text, 1 image, 2 video, 3 audio, -1 padding (see
                ``oscar_mm.modality.token_modalities``).
            attention_mask: (batch, tokens), 0 for padding; without modalities, all other tokens are
                text.

        Raises:
            InputError: if shapes or ids are invalid.
        """
        self._expected.announce(modalities, attention_mask)
        if modalities is not None:
            self._idle = _without_tokens(modalities.numpy())

    def attend_packed(self, mask: torch.Tensor | None) -> bool:
        """Announce a forward pass with attention "oscar".

        Args:
            mask: (batch, stored and new tokens) bool, False for tokens that no query attends to.

        Returns:
            Whether the mask hides stored tokens. New tokens at which it is False are not stored.
        """
        if mask is None:
            self._expected.attention(packed=True)
            return False
        mask, past = mask.to("cpu", torch.bool), self.kv_manager.length
        self._expected.attention(packed=True, padding=mask[:, past:])
        return past > 0 and bool((self.real_tokens(past) & ~mask[:, :past]).any())

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a layer's new keys and values, (batch, KV heads, tokens, head_dim) after RoPE.

        Returns:
            With attention "oscar", the new tokens, tagged for that attention; otherwise past and
            new tokens.
        """
        dtype = autocast_dtype(key_states)
        return self._take(key_states.to(dtype), value_states.to(dtype), layer_idx)

    @eager
    def _take(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.closed:
            raise RuntimeError("the cache is closed")
        layer = self.layer_for(layer_idx, key_states, value_states)
        step = self._step_for(layer, key_states)
        if step.pack_jobs and layer.sigma is None:
            self._warn_if_unbalanced()
        if step.from_pages is None:
            step.from_pages = self._expected.take_packed()
        if step.from_pages:
            # A cache has one dtype, but autocast may be on in only some forward passes.
            key_states, value_states = (x.to(layer.dtype) for x in (key_states, value_states))
            # A view, so that no stored tensor references this layer.
            key_states = key_states.view_as(key_states)
            key_states.oscar_chunk = LayerCall(layer, step)  # pyright: ignore[reportAttributeAccessIssue]
            return key_states, value_states
        keys, values = layer.with_past(step, key_states, value_states)
        layer.append(key_states, value_states, step)
        return keys, values

    def layer_for(
        self, layer_idx: int, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> OscarLayer:
        """Return a layer, set up for keys and values of this shape, dtype and device."""
        layer = self._layer(layer_idx)
        if isinstance(layer, LinearLayer):
            raise NotImplementedError(_TWO_STATES.format(layer_idx))
        if not layer.is_initialized:
            layer.lazy_initialization(key_states, value_states)
            sigma = self._sigma(layer_idx)
            layer.sigma = None if sigma is None else sigma.to(layer.device)
        return layer

    @property
    def balancing(self) -> Mapping[int, torch.Tensor | None] | None:
        """Balancing vectors by layer for stored tokens; for new tokens if none are stored.

        None if nothing is stored and the model is unknown.
        """
        if not self.layers:
            return self.sigmas
        return {layer.index: layer.sigma for layer in self.packed_layers}

    def _sigma(self, layer_idx: int) -> torch.Tensor | None:
        """Return the balancing vector of a layer that receives its first keys."""
        return None if self.sigmas is None else self.sigmas.get(layer_idx)

    def _warn_if_unbalanced(self) -> None:
        """Warn once if keys are packed that a policy would balance, had the model been given."""
        if self.sigmas is None and self.policy.balances and not self._warned:
            self._warned = True
            warnings.warn(_UNBALANCED, stacklevel=_USER + 1)

    def _step_for(self, layer: OscarLayer, key_states: torch.Tensor) -> StepPlan:
        """Return the plan of this forward pass; the first layer of the pass creates the plan."""
        step, rows = self.step, self.kv_manager.sequences
        if step is None or step.is_finished(layer.index):
            batch, _, tokens, _ = key_states.shape
            if rows and len(rows) != batch:
                raise InputError(
                    f"the cache has {len(rows)} sequences, but the new keys have {batch}"
                )
            step = self.begin(self._expected.take(batch, tokens))
        step.enter(layer.index)
        return step

    def _layer(self, index: int) -> OscarLayer | LinearLayer:
        """Return a layer; missing layers up to it are added as empty ``OscarLayer`` objects."""
        while len(self.layers) <= index:
            self.layers.append(OscarLayer(self, len(self.layers)))
        return self.layers[index]

    @property
    def packed_layers(self) -> list[OscarLayer]:
        """Layers that have received keys and values."""
        return [x for x in self.layers if isinstance(x, OscarLayer) and x.is_initialized]

    @property
    def linear_layers(self) -> list[LinearLayer]:
        """Linear-attention layers, which store a state instead of keys and values."""
        return list(self.linear_by_index.values())

    @property
    def linear_by_index(self) -> dict[int, LinearLayer]:
        """Linear-attention layers by layer index."""
        # Testing for LinearLayer, an abstract class of another library, takes 20 times as long.
        return {i: x for i, x in enumerate(self.layers) if not isinstance(x, OscarLayer)}

    @property
    def marks(self) -> Marks:
        """Lengths to which ``crop`` can return, with copies of the states of linear-attention
        layers."""
        return self.kv_manager.marks

    @marks.setter
    def marks(self, marks: Marks) -> None:
        self.kv_manager.marks = marks

    @property
    def states(self) -> list[torch.Tensor]:
        """States of all linear-attention layers, with the copies that ``mark`` made and the spare
        layers."""
        return [*states_of(self.linear_layers), *self.marks.states, *self._spare_states]

    @property
    def _spare_states(self) -> list[torch.Tensor]:
        return states_of(list(self.spares.values()))

    @property
    def state_bytes(self) -> int:
        """Bytes of ``states``."""
        return held_bytes(self.states)

    def state_rows(self) -> list[StateRow | None]:
        """Return where the states of each row with a new token are."""
        rows = range(len(self.kv_manager.sequences))
        return [None if x in self._idle else StateRow(self.layers, self.spares, x) for x in rows]

    def can_spare_states(self, modalities: np.ndarray) -> bool:
        """Return whether ``sparing_states`` works for a step: all rows, which share tensors, must
        have a token."""
        return not self.linear_layers or not _without_tokens(modalities)

    @contextmanager
    def sparing_states(self, modalities: np.ndarray) -> Iterator[None]:
        """Within the block, a step leaves the states of linear-attention layers as they are.

        The step writes to spare layers, from which ``take_spares`` continues.

        Args:
            modalities: (batch, 1) modality ids of the step's tokens, -1 for padding.
        """
        before, self._idle = self._idle, _without_tokens(modalities)
        self.to_spares = True
        try:
            for row in filter(None, self.state_rows() if self.linear_layers else ()):
                row.make_spares()
            yield
        finally:
            self._idle, self.to_spares = before, False

    def take_spares(self) -> bool:
        """Continue from the states that a step within ``sparing_states`` has written, in the rows
        that have a token in the current step.

        Returns:
            False, without a change, if that is not possible because states have been dropped, or
            because a row that shares tensors with others has no token.
        """
        if not self.linear_layers:
            return True
        if self._idle or not self.spares:
            return False
        StateRow(self.layers, self.spares, 0).take_spares()
        return True

    def set_states(self, layers: Mapping[int, LinearLayer], marks: Marks) -> None:
        """Replace the linear-attention layers at these indices, and the copies to return to."""
        for index, layer in layers.items():
            self.layers[index] = layer
        self.marks = marks
        self.store.count_states_of(self)

    def mark(self) -> None:
        """Keep a copy of the states of linear-attention layers, so that ``crop`` can return here.

        Layers with sliding windows that store only what windows reach keep the window of this
        length, as long as it is one of the latest marks. Without layers of either kind, this has no
        effect. Above ``MARK_BYTES``, the oldest copies are dropped; the latest one stays. Selecting
        or reordering rows drops all marks.

        Raises:
            RuntimeError: during a forward pass, or after an interrupted one.
        """
        self.check_complete()
        layers = self.linear_by_index
        if layers or self.store.window_pages:
            self.marks.keep(self.kv_manager.length, layers)

    def longest_crop(self, length: int) -> int:
        """Return the longest length, up to ``length``, to which ``crop`` can return; at least 0."""
        length = min(length, self.kv_manager.length)
        if length >= self.kv_manager.stored_length:
            return length
        if not self.linear_layers and self.kv_manager.can_return(length):
            return length
        marked = [end for end in self.marks.kept if end <= length]
        return max((end for end in marked if self.kv_manager.can_return(end)), default=0)

    def begin(self, modalities: np.ndarray | Sequence[np.ndarray]) -> StepPlan:
        """Begin the next forward pass: plan what every layer does with the new tokens.

        ``update`` calls this method. A caller that calls it before the forward pass can supply the
        modalities of the new tokens.

        Args:
            modalities: (batch, tokens) int8 modality ids, -1 for padding; or a list of (tokens,)
                arrays; see ``KVCacheManager.advance``.

        Raises:
            RuntimeError, FloatingPointError: see ``check_complete``.
        """
        self.check_complete()
        step = self.kv_manager.advance(modalities)
        self.store.reserve()
        if self.step is not None:
            step.layers = frozenset(layer.index for layer in self.packed_layers)
        self.step, self._idle = step, _without_tokens(modalities)
        return step

    def pack_first(self) -> None:
        """Pack the tokens that leave the window in a chained step; call this before its first
        layer."""
        assert self.step is not None
        self.end_step()  # With fixed tables, one launch packs for all layers.
        for layer in () if self.step.packs_at_end else self.packed_layers:
            layer.pack_stored(self.step)

    def store_only(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> None:
        """Store a layer's new keys and values, see ``update``, without attention over them."""
        layer = self.layer_for(layer_idx, key_states, value_states)
        layer.append(key_states, value_states, self._step_for(layer, key_states))

    def replayed(self, step: StepPlan) -> None:
        """Record that all layers have completed a step although their code did not run.

        Call this if a CUDA graph ran the step, or the pages come from a file or other caches.
        """
        for layer in self.packed_layers:
            step.finish(layer.index)
        self.step = step

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let other caches of the store run complete forward passes within the block, between two
        layers of this pass.

        Slots that this pass has yet to read are not reallocated meanwhile.
        """
        sources = {} if self.step is None else self.step.sources()
        for bits, slots in sources.items():
            self.store.allocators[bits].retain(slots)
        self.store.paused += 1
        try:
            yield
        finally:
            self.store.paused -= 1
            for bits, slots in sources.items():
                self.store.allocators[bits].release(slots)

    @property
    def version(self) -> tuple[int, ...]:
        """Value that changes whenever a captured step becomes invalid, because the KV cache manager
        was replaced or a pool has moved."""
        return self.kv_manager.number, self.store.version

    @eager
    def end_step(self, indices: Iterable[int] | None = None) -> None:
        """Pack the tokens that a step on fixed tables defers to its end, in one launch per kind of
        layer.

        Args:
            indices: layers that have stored the step's tokens; all by default.
        """
        if self.step is not None and self.step.packs_at_end:
            some = self.packed_layers if indices is None else [self.layers[i] for i in indices]
            pack_together(some, self.step)

    def check_overflow(self, layer: OscarLayer, tokens: int) -> None:
        """Check that a layer could store the keys and values of a step, ``tokens`` per row.

        This never waits for a GPU: on a GPU, a prompt is checked before the next step. Ranks that
        divide a model check each step later too, all together, as an error within a pass on one of
        them would make the others wait forever.

        Raises:
            FloatingPointError: on a CPU without further ranks, for keys or values that
                ``OscarLayer.check_stored`` rejects.
        """
        on_cpu = layer.device.type == "cpu"
        if on_cpu and self.store.ranks.count == 1:
            layer.check_stored()
        elif on_cpu or tokens > 1:
            self.unchecked = True

    def check_complete(self) -> None:
        """Raise if a forward pass missed a layer, or its keys or values could not be stored.

        Layers with linear attention are not checked: some models write to their states in place.

        Raises:
            RuntimeError: if the cache is incomplete; it can only be reset or closed.
            FloatingPointError: if a prompt on a GPU could not be stored; on a CPU, the forward pass
                itself raises it.
        """
        layers = self.packed_layers
        if self.step is not None:
            self.step.check_finished(layer.index for layer in layers)
        if self.unchecked:
            for layer in layers_unstorable(layers, self.store.ranks):
                raise layer.not_storable
            self.unchecked = False

    def real_tokens(self, count: int) -> torch.Tensor:
        """Return (batch, count) bool on the CPU: whether each of the last tokens is stored (neither
        padding nor forgotten)."""
        rows = [sequence.real_tokens(count) for sequence in self.kv_manager.tables]
        return torch.from_numpy(np.stack(rows))

    @eager
    def unpacked(
        self, layer_idx: int, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys and values in sequence order, (batch, KV heads, length, head_dim)
        each.

        They are in the model's coordinates and, by default, its dtype; padding and forgotten tokens
        are 0.

        Raises:
            InputError: if the layer has linear attention.
        """
        if self._is_linear(layer_idx):
            raise InputError(f"layer {layer_idx} has linear attention and so no keys and values")
        return self.layers[layer_idx].unpacked(
            self.kv_manager.tables, self.kv_manager.length, dtype
        )

    def memory(self) -> MemoryReport:
        """Return the memory usage in bytes, by modality and by kind."""
        states = states_of(self.linear_layers), self.marks.states, self._spare_states
        return measure(self.kv_manager, self.packed_layers, *states)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the slots that the cache uses, without tables and free slots."""
        return self.store.bytes_of_slots(SlotSet.of(self.kv_manager.streams()))

    @property
    def held_bytes(self) -> int:
        """Bytes of the slots and states that the cache uses, without tables and free slots."""
        return self.slot_bytes + self.state_bytes

    def __repr__(self) -> str:
        """Describe policy, rows, tokens and memory in one line."""
        try:
            rows, tokens = len(self.kv_manager.sequences), self.kv_manager.length
            size = f"rows={rows}, tokens={tokens:,}, memory={format_bytes(self.held_bytes)}"
            state = "closed" if self.closed else size
            return f"{type(self).__name__}(policy={self.policy.name or 'custom'}, {state})"
        except Exception:  # The cache is half built, or another thread is changing it.
            return f"{type(self).__name__}(in use)"

    def shrink(self) -> None:
        """Release memory reserved for the next tokens; call it after an answer, between forward
        passes.

        Spare 16-bit slots and spare states become free. On a CPU, free slots are also returned to
        the device unless another cache owns slots of the store. A conversation then takes no more
        memory, apart from its tables, than in 16-bit precision.
        """
        self.kv_manager.release_spare()
        self.spares.clear()
        self.store.sweep()
        if self.store.is_on_cpu and self.kv_manager.holds_all(
            SlotSet.of(self.kv_manager.streams())
        ):
            self.store.trim_after_answer()

    def fork(self) -> OscarCache:
        """Return a cache with the same past that shares the pages; only tables are copied.

        Both caches continue independently and may be cropped, reset or closed: a shared page is
        copied before either cache adds a token to it. The fork inherits this cache's balancing
        vectors.

        Raises:
            RuntimeError: during a forward pass, or after an interrupted one.
        """
        self.check_complete()
        if self.closed:
            raise RuntimeError("the cache is closed")
        twin = OscarCache(self.policy, store=self.store)
        twin._own_store, twin.closed, twin.sigmas = self._own_store, self.closed, self.sigmas
        twin.kv_manager = self.kv_manager.fork()
        twin.take_layers(self)
        if self.step is not None:
            twin.replayed(StepPlan())
        twin._expected, twin.unchecked = copy.copy(self._expected), self.unchecked
        twin._warned, twin.marks = self._warned, self.marks.fork()
        twin.hidden = self.hidden
        return twin

    def take_layers(self, source: OscarCache) -> None:
        """Add copies of the layers of another cache of the same store to this empty cache."""
        packed = {layer.index: layer for layer in forked(source.packed_layers, self)}
        for index, layer in enumerate(source.layers):
            if (twin := packed.get(index)) is None:
                twin = layer.fork(self) if isinstance(layer, OscarLayer) else layer.fork()
            self.layers.append(twin)
        if self.linear_layers:
            self.store.count_states_of(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> OscarCache:
        """Return a fork, which is as independent as a copy but shares the pages."""
        return self.fork()

    __copy__ = fork

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the contents; unpickling puts them in a new store.

        Raises:
            RuntimeError: during a forward pass, or after an interrupted one.
        """
        announced = self.sigmas, self._expected
        return _unpickled, (self.policy, self.closed, announced, Snapshot.of(self))

    def forget(self, start: int, stop: int, row: int = 0) -> None:
        """Drop the tokens ``start`` to ``stop - 1`` of a row and release their pages at once.

        The row's length and the other tokens' positions (which are part of the keys) stay the same:
        the dropped tokens are treated like padding from then on. No token is quantized again; the
        16-bit tokens after them close the gap. With an attention implementation other than "oscar",
        later calls must pass an attention_mask that is 0 for the dropped tokens.

        Args:
            start, stop: indices in the row, counted from 0, padding included.
            row: row of the batch.

        Raises:
            InputError: if the tokens or the row do not exist, or the state of a linear-attention
                layer includes the tokens.
            RuntimeError: during a forward pass, or after an interrupted one.
        """
        if self.linear_layers:
            raise InputError(_FORGET)
        self.check_complete()
        self.kv_manager.forget(row, start, stop)

    @eager
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens in each row, padding included."""
        return self.kv_manager.length

    @eager
    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return (length of the keys in the next forward pass, 0)."""
        self._expected.attention(packed=False)
        return KeyLength(self.kv_manager.length + query_length, self), 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1, which means unbounded."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens of every row (negative, as in transformers).

        If a page is cut, its codes stay the same and fewer of its tokens are in use; no token is
        quantized again.

        Raises:
            NotImplementedError: if linear-attention layers have no copy of their state after the
                remaining tokens, see ``mark``.
            ValueError: if ``tokens_to_remove`` is positive or there are fewer tokens.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): pass the negative number of tokens to remove, "
                f"e.g. crop({tokens_to_remove - self.get_seq_length()}) to keep {tokens_to_remove}"
            )
        length = self.kv_manager.length + tokens_to_remove
        if length > 0 and self.longest_crop(length) != length:
            marked = [one for one in self.marks.kept if self.longest_crop(one) == one]
            shown = ", ".join(f"{one:,}" for one in marked) or "none"
            raise NotImplementedError(
                (_CROP if self.linear_layers else _NO_WINDOW).format(length, shown)
            )
        changes = length < self.kv_manager.stored_length  # Padding changes no states.
        self.kv_manager.crop(-tokens_to_remove)
        if changes and (layers := self.linear_by_index):
            empty = {index: LinearLayer() for index in layers}
            for index, layer in (self.marks.back_to(length) if length else empty).items():
                self.layers[index] = layer
        elif changes and self.marks.kept:
            self.marks = self.marks.up_to(length)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Replace each row i with row ``beam_idx[i]``; beams share the slots of their history."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times; the copies share their slots."""
        rows = range(len(self.kv_manager.sequences))
        self._select([row for row in rows for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the rows at these indices, or the rows at which a bool mask is true."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        self._select(indices.tolist())

    def _select(self, rows: list[int]) -> None:
        self.kv_manager.select(rows)
        self.marks = Marks()
        self.spares.clear()
        for index, layer in self.linear_by_index.items():
            self.layers[index] = layer.selected(rows)

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Return whether a linear-attention layer has a state; by default, the last such layer."""
        if not self.linear_layers or (layer_idx is not None and not self._is_linear(layer_idx)):
            return False
        return super().has_previous_state(layer_idx, state_idx)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the convolution state of a linear-attention layer; None before the first
        tokens."""
        return super().get_conv_state(layer_idx, state_idx) if self._is_linear(layer_idx) else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the recurrent state of a linear-attention layer; None before the first tokens."""
        if not self._is_linear(layer_idx):
            return None
        return super().get_recurrent_state(layer_idx, state_idx)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Store a convolution state; the first such update makes the layer a ``LinearLayer``."""
        self._use_linear(layer_idx, state_idx)
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Store a recurrent state; the first such update makes the layer a ``LinearLayer``."""
        self._use_linear(layer_idx, state_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def _is_linear(self, index: int) -> bool:
        return index < len(self.layers) and isinstance(self.layers[index], LinearLayer)

    def _use_linear(self, index: int, state: int) -> None:
        if self.closed:
            raise RuntimeError("the cache is closed")
        if state:
            raise NotImplementedError(
                f"layer {index} has several linear-attention states, but an OscarCache stores one "
                "per layer: use transformers' DynamicCache for this model"
            )
        layer = self._layer(index)
        if isinstance(layer, OscarLayer):
            if layer.is_initialized:
                raise NotImplementedError(_TWO_STATES.format(index))
            self.layers[index] = LinearLayer()
            self.store.count_states_of(self)

    def reset(self) -> None:
        """Remove all tokens and balancing vectors; replace the store if this cache created it."""
        self.kv_manager.clear()
        if self._own_store:
            self.store = PageStore(self.policy)
        self.kv_manager, self.step = KVCacheManager(self.store), None
        self.layers.clear()
        self.spares.clear()
        self.marks = Marks()
        self._expected, self.unchecked = PendingModalities(), False

    def close(self) -> None:
        """Release all pages; the cache then accepts no more tokens. A second call has no effect."""
        self.reset()
        self.closed = True

    @property
    def rows_differ(self) -> bool:
        """Whether the rows differ in length, as those of a ``BatchView`` may."""
        return len({row.length for row in self.kv_manager.sequences}) > 1

    @property
    def batch_size(self) -> int:
        """Number of rows; -1 before the first tokens."""
        return len(self.kv_manager.sequences) or -1

    @property
    def is_initialized(self) -> bool:
        """Whether any layer has received tokens."""
        return bool(self.packed_layers)

    def offload(self, *args: Any, **kwargs: Any) -> None:
        """Raise NotImplementedError, since pages cannot be offloaded."""
        raise NotImplementedError("OscarCache.offload: pages cannot be offloaded")

    def prefetch(self, *args: Any, **kwargs: Any) -> None:
        """Raise NotImplementedError, since pages cannot be offloaded or prefetched."""
        raise NotImplementedError("OscarCache.prefetch: pages cannot be offloaded or prefetched")

    def early_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Raise NotImplementedError, since pools take their shape from the first keys."""
        raise NotImplementedError(
            "OscarCache.early_initialization is not supported: pools are created when the first "
            "keys are stored"
        )

    def update_indexer(self, *args: Any, **kwargs: Any) -> None:
        """Raise NotImplementedError: there are no pages for indexer keys of sparse attention."""
        raise NotImplementedError("OscarCache.update_indexer: indexer keys cannot be stored")


def _without_tokens(modalities: np.ndarray | Sequence[np.ndarray]) -> frozenset[int]:
    """Return the rows in which all new tokens are padding."""
    if isinstance(modalities, np.ndarray):
        return frozenset(np.flatnonzero((modalities == PADDING).all(1)).tolist())
    return frozenset(i for i, row in enumerate(modalities) if (row == PADDING).all())


def _unpickled(
    policy: KVPolicy, closed: bool, announced: tuple[Any, Any], snapshot: Snapshot
) -> OscarCache:
    """Restore the cache that ``OscarCache.__reduce__`` pickled."""
    cache = OscarCache(policy)
    cache.closed, (cache.sigmas, cache._expected) = closed, announced
    snapshot.placed(cache)
    return cache
