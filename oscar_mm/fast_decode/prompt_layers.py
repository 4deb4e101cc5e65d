"""Prompt layers: run a decoder's layers on prompt tokens in fewer launches than the modules.

For a prompt of 2,000 tokens, a third of the time goes to norms, RoPE, gates and residual sums,
which transformers' modules compute in about thirty small operations per layer. Here they are fused
into the operations of ``FastLayer``. Only the layers are replaced; towers, embeddings, masks and
whatever the model does between layers are unchanged.

For shorter prompts, the host is slower than the GPU. ``PrefillGraphs`` pads them to one of a few
lengths, and replays the work before and after attention as CUDA graphs.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from oscar_mm.cache.cache import OscarCache, cache_of
from oscar_mm.fast_decode.decoder import Capture, supports
from oscar_mm.fast_decode.graph_cache import GraphCache
from oscar_mm.fast_decode.graph_runner import graph_capture
from oscar_mm.fast_decode.hybrid_layers import is_hybrid
from oscar_mm.fast_decode.layers import FastLayer
from oscar_mm.fast_decode.row_adapters import RowAdapters, choosing, chosen
from oscar_mm.modules import devices
from oscar_mm.tensor_parallel import TPGroup

_LENGTHS = (
    *(8, 16, 24, 32, 64, 96),
    *(*range(128, 512, 64), *range(512, 1024, 128), *range(1024, 2049, 256)),
)
"""Lengths of captured passes in tokens; prompts are padded to the next length."""
MAX_RECORDED = _LENGTHS[-1]
_MAX_LENGTHS = 8
"""Maximum number of lengths whose graphs are kept; each takes 20 to 70 MB of GPU memory (36 layers,
H100)."""
_log = logging.getLogger(__name__)

_REPORTS = ("output_attentions", "output_hidden_states", "output_router_logits")
"""Arguments of a forward pass that request intermediate results."""


class _States(NamedTuple):
    """Tensors of captured passes, at fixed addresses.

    Attributes:
        hidden: (tokens, hidden size): hidden states before and after a layer.
        heads: (tokens, query, key and value heads, head_dim): the projections.
        found: (tokens, query heads * head_dim): output of attention.
        cosine, sine: (tokens, head_dim): RoPE.
        idle: (tokens, ranks): adapters that tokens do not use, see ``choosing``; without adapters,
            ranks is 0.
    """

    hidden: torch.Tensor
    heads: torch.Tensor
    found: torch.Tensor
    cosine: torch.Tensor
    sine: torch.Tensor
    idle: torch.Tensor

    @classmethod
    def empty(
        cls, layer: FastLayer, hidden: torch.Tensor, cosine: torch.Tensor, ranks: int
    ) -> _States:
        """Allocate tensors for the longest pass through layers that all have the same shape and
        dtype."""
        head_dim, width = layer.attention.head_dim, sum(layer.heads)
        shapes = (hidden.shape[-1:], (width, head_dim), (layer.heads[0] * head_dim,))
        with torch.inference_mode(False):
            states = [hidden.new_zeros(MAX_RECORDED, *shape) for shape in shapes]
            angles = [cosine.new_zeros(MAX_RECORDED, head_dim) for _ in range(2)]
            idle = hidden.new_ones(MAX_RECORDED, ranks, dtype=torch.bool)
        return cls(*states, *angles, idle=idle)

    def first(self, tokens: int) -> _States:
        """Return the tensors, sliced to their first ``tokens`` tokens."""
        return _States(*(x[:tokens] for x in self))


class PrefillGraphs:
    """Runs prefill passes of up to ``MAX_RECORDED`` tokens with CUDA graphs of the layers, except
    for attention.

    The first pass of each length uses no graphs, since it may be the only one and compiles any
    missing kernels; later passes replay graphs, with bitwise identical results. Padding goes
    through norms, products and experts, which process each token independently, but not through
    attention or into the cache.

    Args:
        layers: layers of the same shape.
        capture: capture function.
        ranks: number of ranks of all adapters that prompts may choose.
    """

    def __init__(self, layers: Sequence[FastLayer], capture: Capture, ranks: int = 0) -> None:
        self._layers, self._capture, self._fails = layers, capture, False
        self._ranks = ranks
        self._graphs = OrderedDict[int, GraphCache]()
        """Graphs of each length, with the most recently used length last."""
        self._whole: _States | None = None
        self._states: _States | None = None
        """Padded states of the current pass; None for a pass that does not use graphs."""

    def begin(self, hidden: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> None:
        """Begin a pass.

        Args:
            hidden: (sequences, tokens, hidden size).
            cosine, sine: (1, tokens, head_dim).
        """
        sequences, tokens, _ = hidden.shape
        self._states = None
        if self._fails:
            self.clear()
        if sequences > 1 or tokens > MAX_RECORDED or self._fails:
            return
        if self._whole is None:
            try:
                self._whole = _States.empty(self._layers[0], hidden, cosine, self._ranks)
            except torch.OutOfMemoryError as error:
                _log.warning("prefill runs eagerly: %s", error)
                self._fails = True
                return
        length = _LENGTHS[bisect_left(_LENGTHS, tokens)]
        if length not in self._graphs:
            parts = 2 * len(self._layers)
            self._graphs[length] = GraphCache(self._capture, hidden.device, parts)
        self._graphs.move_to_end(length)
        if len(self._graphs) > _MAX_LENGTHS:
            self._graphs.popitem(last=False)
        self._states = self._whole.first(length)
        # Reset the padding to 0, whatever the last pass left there.
        self._states.hidden[tokens:].zero_()
        self._states.found[tokens:].zero_()
        self._states.cosine[:tokens].copy_(cosine[0])
        self._states.sine[:tokens].copy_(sine[0])
        idle, mine = chosen(), self._states.idle[:tokens]
        mine.fill_(True) if idle is None else mine.copy_(idle)

    def clear(self) -> None:
        """Drop all graphs and their tensors; not within a pass."""
        self._whole = self._states = None
        self._graphs.clear()

    @property
    def takes_pass(self) -> bool:
        """Whether the current pass uses graphs."""
        return self._states is not None

    def __call__(self, index: int, hidden: torch.Tensor, cache: OscarCache) -> torch.Tensor:
        """Run a layer and return its (1, tokens, hidden size) output, which the next layer
        overwrites."""
        assert self._states is not None
        layer, states, tokens = self._layers[index], self._states, hidden.shape[1]
        if hidden.data_ptr() != states.hidden.data_ptr():
            states.hidden[:tokens].copy_(hidden[0])
        graphs = self._graphs[len(states.hidden)]
        with choosing(states.idle):  # At a fixed address, also if no token uses adapters.
            graphs.run(("before", index), partial(_before, layer, states))
            states.found[:tokens].copy_(layer.attend(states.heads[:tokens], 1, cache))
            graphs.run(("after", index), partial(_after, layer, states))
        self._fails |= graphs.fails  # Later passes run without padding.
        return states.hidden[None, :tokens]


def _before(layer: FastLayer, states: _States) -> None:
    """Run the part of a layer before attention."""
    states.heads.copy_(layer.projected(states.hidden))
    layer.turn_(states.heads, states.cosine, states.sine)


def _after(layer: FastLayer, states: _States) -> None:
    """Run the part of a layer after attention."""
    rows = layer.output(states.found, residual=states.hidden, in_place=True)
    found = layer.feed_forward(rows)
    if found is not states.hidden:
        states.hidden.copy_(found)


class PromptLayers:
    """Runs the layers of a decoder on prompts.

    Args:
        model: transformers model that ``takes`` accepts.
        max_total_tokens: maximum number of tokens that an MLP or a mixture of experts processes at
            a time.
        capture: capture function; by default, CUDA graphs are captured if they are supported.
    """

    def __init__(
        self, model: Any, max_total_tokens: int, capture: Capture | Literal["auto"] | None = "auto"
    ) -> None:
        self._layers = [(layer, FastLayer.of(layer)) for layer in model.get_decoder().layers]
        self._max_tokens = max_total_tokens
        fast = [fast for _, fast in self._layers]
        if capture == "auto":
            capture = graph_capture(devices(model.get_decoder().layers), small=True)
        adapters = RowAdapters.of(model)
        ranks = 0 if adapters is None else adapters.table.shape[1]
        self._graphs = None if capture is None else PrefillGraphs(fast, capture, ranks)

    @staticmethod
    def takes(model: Any) -> bool:
        """Return whether the layers are undivided, on a single device, and run unmodified."""
        layers = model.get_decoder().layers
        return (
            supports(model)
            and not any(map(is_hybrid, layers))
            and TPGroup.of(model).count == 1
            and len(devices(layers)) == 1
            and not any("forward" in vars(layer) for layer in layers)
        )

    def release_graphs(self) -> None:
        """Drop the CUDA graphs of prompts; later prompts are captured again."""
        if self._graphs is not None:
            self._graphs.clear()

    @contextmanager
    def reading(self, cache: OscarCache) -> Iterator[None]:
        """Make the model's layers run as ``FastLayer`` within the block, in calls with this cache.

        Other threads may meanwhile call the layers with another cache; these calls run unmodified.
        """
        for index, (layer, fast) in enumerate(self._layers):
            layer.forward = self._forward(index, layer, fast, cache)
        try:
            yield
        finally:
            for layer, _ in self._layers:
                vars(layer).pop("forward", None)

    def _forward(
        self, index: int, layer: Any, fast: FastLayer, cache: OscarCache
    ) -> Callable[..., torch.Tensor]:
        graphs = self._graphs

        def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            others = cache_of(kwargs) is not cache
            if others or args or any(kwargs.get(name) for name in _REPORTS):
                return type(layer).forward(layer, hidden_states, *args, **kwargs)
            batch, tokens, _ = hidden_states.shape
            mask, angles = kwargs.get("attention_mask"), kwargs["position_embeddings"]
            if graphs is not None and mask is None:
                if index == 0:
                    graphs.begin(hidden_states, *angles)
                if graphs.takes_pass:
                    return graphs(index, hidden_states, cache)
            cosine, sine = (x.expand(batch, tokens, -1).flatten(0, 1) for x in angles)
            rows = fast.attended(hidden_states.flatten(0, 1), batch, cosine, sine, cache, mask)
            if len(rows) <= self._max_tokens:
                return fast.feed_forward(rows).view_as(hidden_states)
            for part in rows.split(self._max_tokens):
                part.copy_(fast.feed_forward(part))
            return rows.view_as(hidden_states)

        return forward
