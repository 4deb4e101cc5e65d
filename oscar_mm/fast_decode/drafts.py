"""Drafts: next tokens, guessed by a checkpoint's own module for multi-token prediction (MTP).

Qwen3.5 was trained with a module that reads the decoder's output for a token and the embedding of
the next token, and predicts the token after that::

    x_i = fc([norm(embedding of token i), norm(decoder output for token i - 1)])
    draft of token i + 1 = argmax(head(norm(layer(x_0, ..., x_i))))

``layer`` is a decoder layer with attention. Its keys and values belong to the same tokens as those
of the decoder, so they are one more layer of the cache, with the same slots: they are packed,
cropped, forked and saved with the others. Drafts change the speed of an answer, not its tokens:
each draft is compared with the token that the model itself chooses.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from oscar_mm.cache.cache import OscarCache, cache_of
from oscar_mm.cache.paged_attention import attend_stored
from oscar_mm.fast_decode.centered_norm import CenteredNorm
from oscar_mm.fast_decode.hybrid_layers import GatedLayer
from oscar_mm.fast_decode.layers import Product
from oscar_mm.fast_decode.quantized_modules import QuantizedLinear

_NAME = "oscar_drafts"
_PIECE = 1 << 13
"""Maximum number of prompt tokens that are projected at a time."""


class Drafts(nn.Module):
    """Weights of a Qwen3.5 checkpoint's draft module, named as in the checkpoint.

    Args:
        decoder: decoder of transformers, whose layers have the same shapes.
    """

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        config = copy.copy(decoder.config)
        config.layer_types = [*config.layer_types, "full_attention"]
        self.index = config.num_hidden_layers
        """Index of the layer in the cache."""
        width, norm = config.hidden_size, type(decoder.norm)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding = norm(width, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = norm(width, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([type(decoder.layers[0])(config, self.index)])
        self.norm = norm(width, eps=config.rms_norm_eps)
        self.head: QuantizedLinear | None = None
        """Output layer for drafts; None for that of the model."""

    @staticmethod
    def of(model: Any) -> Drafts | None:
        """Return the module of a transformers model for generation; None if it has none."""
        return getattr(model.get_decoder(), _NAME, None)

    def attach(self, decoder: Any, head: nn.Module) -> None:
        """Attach the module to a decoder, so that ``of`` finds it, and store its keys and values of
        each prompt from now on.

        Args:
            decoder: decoder of the model.
            head: output layer of the model; on a GPU, drafts use a copy in FP8, and all products
                of this module are in FP8, since reading weights takes most of the time of a draft.
        """
        if type(head) is nn.Linear and head.weight.is_cuda and head.weight.itemsize == 2:
            self.head = QuantizedLinear.of(head, head.weight.device, 8)
            for name, module in list(self.named_modules()):
                if type(module) is nn.Linear:
                    self.set_submodule(name, QuantizedLinear.of(module, module.weight.device, 8))
        setattr(decoder, _NAME, self)
        decoder.register_forward_hook(_store_prompt, with_kwargs=True)


class FastDrafts:
    """Launches of the draft module.

    Args:
        drafts: weights.
    """

    def __init__(self, drafts: Drafts) -> None:
        self.index = drafts.index
        self._layer = GatedLayer.of(drafts.layers[0])
        self._join = Product.of(drafts.fc, dtype=drafts.norm.weight.dtype)
        head, dtype = drafts.head, drafts.norm.weight.dtype
        self.head = None if head is None else Product.of(head, dtype=dtype)
        """Output layer for drafts; None for that of the model."""
        self.norm, self._embedding_norm, self._hidden_norm = (
            CenteredNorm(one.weight, one.eps)
            for one in (drafts.norm, drafts.pre_fc_norm_embedding, drafts.pre_fc_norm_hidden)
        )

    def is_complete_in(self, cache: OscarCache) -> bool:
        """Return whether a cache has this module's keys and values of all tokens before the current
        step."""
        known = None if cache.step is None else cache.step.layers
        return known is None or self.index in known

    def __call__(
        self,
        hidden: torch.Tensor,
        embedded: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        cache: OscarCache,
        place: int,
    ) -> torch.Tensor:
        """Store a token of a chained step; return the (1, hidden size) output of the layer.

        Args:
            hidden: (1, hidden size): output of the decoder for the token before; for the token of
                a draft, which the decoder has not read yet, normalized output of this module.
            embedded: (1, hidden size): embedding of the token.
            angles: cosines and sines of RoPE, (1, head_dim) each.
            cache: cache in a chained step.
            place: row of the token in the step.
        """
        rows = self._joined(hidden, embedded)
        asked, *others = self._layer.turned(rows, *angles)
        layer, step = cache.layers[self.index], cache.step
        assert step is not None
        # Attention has tables for all rows of the step; the output of the others is not used.
        queries, keys, values = (
            side[:, :, None].expand(len(step.past), -1, -1, -1).contiguous()
            for side in (asked[:, ::2], *others)
        )
        layer.append(keys, values, step, row=place)
        found = attend_stored(layer, queries, keys, values, self._layer.attention.scaling, step)
        return self._layer.feed_forward(self._layer.gated(found[place].view(1, -1), asked, rows))

    def keys_and_values(
        self,
        hidden: torch.Tensor,
        embedded: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Return keys and values, (tokens, KV heads, head_dim) each; see ``__call__``."""
        turned = self._layer.turned(self._joined(hidden, embedded), cosine, sine)
        return [side.contiguous() for side in turned[1:]]

    def store(
        self,
        hidden: torch.Tensor,
        embedded: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        cache: OscarCache,
    ) -> None:
        """Store tokens without drafting the next ones; see ``__call__``.

        Args:
            hidden, embedded: (batch, tokens, hidden size).
            cosine, sine: (batch * tokens, head_dim).
        """
        rows = (*(x.flatten(0, 1) for x in (hidden, embedded)), cosine, sine)
        split = (x.split(_PIECE) for x in rows)
        parts = [self.keys_and_values(*part) for part in zip(*split, strict=True)]
        sides = (torch.cat(side) for side in zip(*parts, strict=True))
        batch = len(hidden)
        keys, values = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in sides)
        cache.store_only(keys, values, self.index)

    def _joined(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        both = self._embedding_norm.at_once(embedded), self._hidden_norm.at_once(hidden)
        return self._join(torch.cat(both, -1))


@torch.no_grad()
def _store_prompt(decoder: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook of the decoder: store a prompt's keys and values, which drafts read."""
    cache, drafts = cache_of(kwargs), getattr(decoder, _NAME)
    fast = FastDrafts(drafts)
    if not isinstance(cache, OscarCache) or not fast.is_complete_in(cache):
        return
    hidden, embedded = output.last_hidden_state, kwargs.get("inputs_embeds")
    if embedded is None:
        embedded = decoder.embed_tokens(kwargs["input_ids"])
    positions, (batch, tokens, _) = kwargs.get("position_ids"), hidden.shape
    if positions is None:
        past = cache.get_seq_length() - tokens
        positions = torch.arange(past, past + tokens, device=hidden.device).expand(batch, -1)
    cosine, sine = decoder.rotary_emb(hidden, positions[-3:] if positions.ndim == 3 else positions)
    cosine, sine = (x.expand(batch, tokens, -1).flatten(0, 1) for x in (cosine, sine))
    first = hidden.new_zeros(batch, 1, hidden.shape[2])
    if cache.hidden is not None and batch == 1:
        first[:, 0] = cache.hidden
    before = torch.cat([first, hidden[:, :-1]], 1)
    fast.store(before, embedded, cosine, sine, cache)
    cache.hidden = hidden[:, -1].clone() if batch == 1 else None
