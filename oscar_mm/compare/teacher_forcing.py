"""Teacher forcing: run methods over a recorded past, and score them against the 16-bit cache.

The model reads a prompt once, with exact attention, and its keys and values are recorded. Each
method then stores and restores them, and the model reads the text after the prompt over the
restored keys and values. So all methods are judged on the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, scaled_dot_product_attention
from transformers import Cache

from oscar_mm.cache.cache import as_argument
from oscar_mm.cache.paged_attention import KeyLength
from oscar_mm.engine.prefill import head_of
from oscar_mm.errors import InputError
from oscar_mm.ops.sinks import with_sink_key
from oscar_mm.quant.balance import sigmas_of_model

IGNORE = -100
"""Target of a token whose prediction is not judged."""
Pair = tuple[Tensor, Tensor]
_RUNNERS_UP = 4
_STATES = (
    "the model has layers of linear attention, whose states inspect and bench accuracy cannot "
    "record: use a model with attention in all layers, or compare answers with verify"
)


@dataclass(frozen=True)
class LayerStates:
    """States of one layer for a batch of prompts with the same layout, without padding.

    Attributes:
        index: index of the layer.
        module: attention module of the layer.
        scaling: factor that the scores are multiplied by.
        keys: (rows, KV heads, tokens, head_dim) after RoPE, in a 16-bit dtype.
        values: (rows, KV heads, tokens, head_dim), in a 16-bit dtype.
        first_queries: (1, query heads, tokens, head_dim), queries of the first row.
        sigmas: scale factors per channel, (KV heads or 1, head_dim), by the value of
            ``PageCodec.centers_keys``; None if the layer has none.
    """

    index: int
    module: nn.Module
    scaling: float
    keys: Tensor
    values: Tensor
    first_queries: Tensor
    sigmas: Mapping[bool, Tensor | None]


@dataclass(frozen=True)
class Forced:
    """Text after the prompts, the same for all methods.

    Attributes:
        ids: (rows, tokens) token ids, right-padded with any valid id.
        positions: (rows, tokens) or (3, rows, tokens) position ids.
        targets: (rows, tokens) expected next token after each token; IGNORE if it is not judged.
        answers: (rows, tokens) index, within the row, of the answer that a target belongs to.
        count: number of answers per row.
    """

    ids: Tensor
    positions: Tensor
    targets: Tensor
    answers: Tensor
    count: int = 1


class ForcedCache(Cache):
    """Stand-in for a cache during a forward pass of a model with attention "oscar".

    New tokens attend to the given past and, causally, to each other, with PyTorch operations;
    nothing is stored.

    Args:
        past: function from the index of a layer to its past keys and values, (rows, KV heads,
            tokens, head_dim) each; None for no past.
        length: number of past tokens.
        look: function called with (index, module, queries, keys, values, scaling) for each layer's
            new tokens.
    """

    # See the attributes of ``OscarCache``, which the mask function reads.
    reads_windows = rows_differ = False

    def __init__(
        self,
        past: Callable[[int], Pair] | None = None,
        length: int = 0,
        look: Callable[..., None] | None = None,
    ) -> None:
        super().__init__(layers=[])
        self.past, self.length, self.look = past, length, look

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Pair:
        """Return the new keys and values; the keys' attribute ``oscar_chunk`` is the object that
        attention "oscar" calls."""
        keys = key_states.view_as(key_states)
        keys.oscar_chunk = self.attention_of(layer_idx)  # pyright: ignore[reportAttributeAccessIssue]
        return keys, value_states

    def attention_of(self, index: int) -> Any:
        """Return the attention of a layer, whose ``attend`` attention "oscar" calls."""
        return _Attention(self, index)

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        """Raise InputError: the states of linear attention are not stand-ins."""
        raise InputError(_STATES)

    def get_conv_state(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Raise InputError, see ``has_previous_state``."""
        raise InputError(_STATES)

    def attend_packed(self, mask: Tensor | None) -> bool:
        """Check that the mask hides no tokens, and return False, since no past tokens are hidden.

        Raises:
            ValueError: if the mask hides tokens.
        """
        if mask is not None and not bool(mask.all()):
            raise ValueError("attention_mask: prompts to compare or inspect must have no padding")
        return False

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the number of past and new tokens, and 0."""
        return KeyLength(self.length + query_length, self), 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of past tokens."""
        return self.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1 for an unbounded cache."""
        return -1


class _Attention:
    """Attention of one layer, called by attention "oscar"."""

    def __init__(self, cache: ForcedCache, index: int) -> None:
        self._cache, self._index = cache, index

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        visible: Tensor | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return the output, (rows, query heads, tokens, head_dim)."""
        cache, tokens = self._cache, query.shape[2]
        if cache.look is not None:
            cache.look(self._index, module, query, key, value, scaling)
        if cache.past is not None:
            pasts = cache.past(self._index)
            key, value = (
                torch.cat([old.to(new.dtype), new], dim=2)
                for old, new in zip(pasts, (key, value), strict=True)
            )
        if visible is None and cache.length:
            place = torch.arange(key.shape[2], device=query.device)
            visible = place[-tokens:, None] >= place
        # Expand KV heads, because float32 attention with head groups materializes all scores.
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        if sinks is not None:
            query, key, value, visible = with_sink_key(query, key, value, visible, sinks, scaling)
        return scaled_dot_product_attention(
            query, key, value, visible, is_causal=visible is None, scale=scaling
        )


class Recorder:
    """Recorder of every layer's states for a prompt; pass its ``cache`` to the model.

    Args:
        model: model that computes the states, and from whose weights the scale factors per channel
            are computed.
        dtype: 16-bit dtype to store keys and values in, unless the model itself has a 16-bit dtype.
    """

    def __init__(self, model: Any, dtype: torch.dtype = torch.bfloat16) -> None:
        self.layers: list[LayerStates] = []
        self._sigmas = {
            centered: sigmas_of_model(model, centered=centered) for centered in (True, False)
        }
        self.cache, self._dtype = ForcedCache(look=self._keep), dtype

    def _keep(
        self,
        index: int,
        module: nn.Module,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float,
    ) -> None:
        dtype = keys.dtype if keys.dtype.itemsize == 2 else self._dtype
        self.layers.append(
            LayerStates(
                index=index,
                module=module,
                scaling=scaling,
                keys=keys.to(dtype),
                values=values.to(dtype),
                first_queries=queries[:1].to(dtype),
                sigmas={centered: found.get(index) for centered, found in self._sigmas.items()},
            )
        )


def as_recorded(layers: Sequence[LayerStates]) -> Callable[[int], Pair]:
    """Return a ``past`` function for ``ForcedCache`` that returns the recorded keys and values."""
    return lambda index: (layers[index].keys, layers[index].values)


@torch.no_grad()
def answer_logits(model: Any, past: Callable[[int], Pair], length: int, forced: Forced) -> Tensor:
    """Compute (judged tokens, vocabulary) float32 logits, in the order of ``forced.targets``.

    Args:
        model: generative model with attention "oscar" in its decoder.
        past: function from the index of a layer to its past, see ``ForcedCache``.
        length: number of past tokens.
        forced: text to read after the past.
    """
    output = model.get_decoder()(
        input_ids=forced.ids,
        position_ids=forced.positions,
        **as_argument(ForcedCache(past, length)),
        use_cache=True,
    )
    hidden = output.last_hidden_state[forced.targets != IGNORE]
    return head_of(model)(hidden).float()


@dataclass
class Scores:
    """Scores of a method, summed over the judged tokens of each prompt.

    Attributes:
        exact: for each answer (not prompt), 1 if all its tokens are the most likely ones, else 0.
        agreed: number of judged tokens with the same most likely token as with the 16-bit cache.
        divergence: sum over judged tokens of the KL divergence of the method's next-token
            distribution from that of the 16-bit cache, in nats.
        margin: sum over judged tokens of the mean squared error of the differences between the
            logit of the most likely token and the logits of the next four. Unlike the divergence,
            the margin does not depend on the few tokens that are nearly wrong, and it needs fewer
            prompts to rank methods.
        tokens: number of judged tokens.
    """

    exact: list[Tensor] = field(default_factory=list)
    agreed: list[Tensor] = field(default_factory=list)
    divergence: list[Tensor] = field(default_factory=list)
    margin: list[Tensor] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)

    def add(self, forced: Forced, exact_logits: Tensor, logits: Tensor) -> Tensor:
        """Add a batch to the scores.

        Args:
            forced: text that the model read.
            exact_logits: (judged tokens, vocabulary) logits with the 16-bit cache.
            logits: (judged tokens, vocabulary) logits with the method.

        Returns:
            (judged tokens,) divergence after each token.
        """
        judged = forced.targets != IGNORE
        rows = judged.nonzero()[:, 0]
        divergence = kl_divergence(exact_logits, logits)
        choice = logits.argmax(-1)
        agreed = (choice == exact_logits.argmax(-1)).float()
        count = len(judged)
        answer = rows * forced.count + forced.answers[judged]
        wrong = _sums((choice != forced.targets[judged]).float(), answer, count * forced.count)
        there = _sums(torch.ones_like(agreed), answer, count * forced.count)
        self.exact.append((wrong == 0)[there > 0].float())
        self.agreed.append(_sums(agreed, rows, count))
        self.divergence.append(_sums(divergence, rows, count))
        self.margin.append(_sums(_margin_error(exact_logits, logits), rows, count))
        self.tokens.append(_sums(torch.ones_like(agreed), rows, count))
        return divergence

    def summary(self) -> dict[str, float | int]:
        """Return shares and means over tokens, with standard errors over prompts ("..._error").

        "exact" is a share of answers, so its standard error is over answers.
        """
        parts = (self.exact, self.agreed, self.divergence, self.margin, self.tokens)
        exact, agreed, divergence, margin, tokens = (torch.cat(x).double().cpu() for x in parts)
        kl, kl_error = ratio(divergence, tokens)
        margin_mean, margin_error = ratio(margin, tokens)
        agreement, agreement_error = ratio(agreed, tokens)
        share, share_error = ratio(exact, torch.ones_like(exact))
        return {
            "prompts": len(tokens),
            "answers": len(exact),
            "tokens": int(tokens.sum()),
            "exact": share,
            "exact_error": share_error,
            "agreement": agreement,
            "agreement_error": agreement_error,
            "kl": kl,
            "kl_error": kl_error,
            "margin": margin_mean,
            "margin_error": margin_error,
        }


def kl_divergence(exact_logits: Tensor, logits: Tensor) -> Tensor:
    """Return the KL divergence of the distributions of ``logits`` from those of ``exact_logits``.

    Args:
        exact_logits, logits: (..., vocabulary) float32.

    Returns:
        (...) divergence in nats.
    """
    expected, actual = log_softmax(exact_logits, -1), log_softmax(logits, -1)
    return (expected.exp() * (expected - actual)).sum(-1)


def ratio(sums: Tensor, counts: Tensor) -> tuple[float, float]:
    """Return the ratio of two sums and its standard error, by the delta method.

    Args:
        sums: (parts,) float64 terms of the first sum, such as divergences by prompt.
        counts: (parts,) float64 terms of the second sum, such as tokens by prompt.
    """
    quotient = sums.sum() / counts.sum()
    error = (sums - quotient * counts).square().sum().sqrt() / counts.sum()
    return quotient.item(), error.item()


def _margin_error(expected: Tensor, actual: Tensor) -> Tensor:
    top = expected.topk(min(_RUNNERS_UP + 1, expected.shape[-1]), dim=-1).indices
    shift = (actual - expected).gather(-1, top)
    return (shift[:, :1] - shift[:, 1:]).square().mean(-1)


def _sums(values: Tensor, places: Tensor, count: int) -> Tensor:
    return torch.zeros(count, device=values.device).index_add(0, places, values)
