"""Score errors: check, using only a model's weights, whether pages preserve its attention scores.

Keys of random inputs are packed like those of a text, and the resulting scores are compared with
the exact ones. 2-bit codes usually cause errors of a third to a half of the scores' standard
deviation, 3-bit codes a sixth. If the error is as large as the deviation, the keys have large
components that the queries do not need, such as biases hundreds of times as large as the
differences between tokens, and answers may break.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from oscar_mm.ops.library import recipe_numbers
from oscar_mm.ops.store import whole_page_tables
from oscar_mm.ops.store_torch import StoreArguments, store_by_torch
from oscar_mm.pages.codecs.registry import codec_of
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat
from oscar_mm.pages.quantize import Recipe, quantize, unpack_by_torch
from oscar_mm.policy import KVPolicy
from oscar_mm.quant.balance import attentions, probes, projected, rotary_angles, sigmas_of_model
from oscar_mm.quant.basis import Basis

MOST = 1.0
"""Score error, relative to the standard deviation of scores, above which a layer is reported."""
_log = logging.getLogger(__name__)


def warn_of_hard_layers(model: Any, policy: KVPolicy) -> None:
    """Log a warning that lists the layers whose keys the policy's pages do not preserve well."""
    if not policy.packs:
        return
    hard = {name: error for name, error in score_errors(model, policy).items() if error > MOST}
    if hard:
        named = ", ".join(f"{name} ({error:.1f})" for name, error in hard.items())
        _log.warning(
            "the policy packs some keys poorly: %s. The numbers are errors of attention scores "
            "relative to the scores' spread (0.2 to 0.5 is usual); answers may be wrong: choose "
            "the policy 'standard' or 'bf16'",
            named,
        )


@torch.inference_mode()
def score_errors(model: Any, policy: KVPolicy) -> dict[str, float]:
    """Return the largest score error of any KV head for each attention module, by module name.

    Errors are relative to the standard deviation of the scores. An error that is the same for all
    keys of a query does not count, since softmax ignores it. Modules without separate query and key
    projections are left out.

    Args:
        model: a transformers decoder, or a model that contains one.
        policy: policy that packs tokens.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    centered = codec_of(policy).centers_keys(policy)
    sigmas = sigmas_of_model(decoder, centered=centered) if policy.balances else {}
    names = {id(module): name for name, module in model.named_modules()}
    found = {}
    for layer, attention in attentions(decoder):
        if hasattr(attention, "q_proj") and hasattr(attention, "k_proj"):
            states = _rotated_states(layer, attention, rotary_angles(attention, decoder))
            sigma = sigmas.get(attention.layer_idx)
            error = _error(*states, policy, sigma)
            found[names[id(attention)]] = error
    return found


def _rotated_states(
    layer: nn.Module, attention: Any, angles: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return (KV heads, queries, d) queries and (KV heads, 128, d) keys of random inputs.

    They are float32, after RoPE at different positions, on the device of the projections: on a CPU,
    many small operations are slow if PyTorch has more threads than there are free cores.
    """
    projections = projected(attention, probes(layer, attention)[:PAGE_TOKENS])
    states = []
    for name, of_all in zip(("q_norm", "k_norm"), projections, strict=True):
        x, norm = of_all.unflatten(-1, (-1, attention.head_dim)), getattr(attention, name, None)
        if norm is not None and norm.weight.numel() == attention.head_dim:
            x = norm(x)
        x = x.float()
        states.append((x if angles is None else _turned(x, angles.to(x.device))).transpose(0, 1))
    queries, keys = states
    return queries.unflatten(0, (len(keys), -1)).flatten(1, 2), keys


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    """Apply RoPE to (tokens, heads, d) states: token n is rotated by n times the angles."""
    turns = torch.arange(len(x), device=x.device)[:, None, None] * angles
    one, other, rest = x.split([len(angles)] * 2 + [x.shape[-1] - 2 * len(angles)], -1)
    cos, sin = turns.cos(), turns.sin()
    return torch.cat([one * cos - other * sin, other * cos + one * sin, rest], -1)


def _error(queries: Tensor, keys: Tensor, policy: KVPolicy, sigma: Tensor | None) -> float:
    """Return the largest error of any KV head for the result of ``_rotated_states``; infinite if
    pages cannot store the keys."""
    back = _restored(keys[None].bfloat16(), policy, sigma)
    if back is None:
        return float("inf")

    def deviation(keys: Tensor) -> Tensor:
        scores = queries @ keys.mT
        return (scores - scores.mean(-1, keepdim=True)).square().mean((1, 2)).sqrt()

    return float((deviation(back[0] - keys) / deviation(keys)).max())


def _restored(keys: Tensor, policy: KVPolicy, sigma: Tensor | None) -> Tensor | None:
    """Pack and unpack keys; return (1, KV heads, 128, d), or None if a page cannot store them.

    This uses PyTorch operations, so that loading a model compiles nothing.
    """
    _, heads, _, head_dim = keys.shape
    page_format = PageFormat.of(policy, policy.packed_bits[0], heads, head_dim)
    sigma = sigma if sigma is None else sigma.to(keys.device)
    recipe, basis = Recipe.of(page_format, policy), Basis(head_dim, policy.rotate, sigma)
    if page_format.codec.appends_tokens:
        pages = torch.zeros(1, page_format.page_bytes, dtype=torch.uint8, device=keys.device)
        bad = torch.zeros(1, dtype=torch.int32, device=keys.device)
        jobs, begins = whole_page_tables(1, keys.device)
        tables = (keys.new_empty(0, 2, heads, head_dim), jobs, begins[: page_format.center])
        numbers = recipe_numbers(recipe)
        store_by_torch(StoreArguments(keys, keys, *tables, pages, bad, sigma, numbers))
        fits = not bool(bad)
    else:
        pages, finite = quantize(keys, keys, recipe, sigma)
        fits = bool(finite)
    return unpack_by_torch(pages, page_format, basis, torch.float32)[0] if fits else None
