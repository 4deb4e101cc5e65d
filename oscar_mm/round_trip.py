"""roundtrip: keys and values as the cache would return them, through real packed pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oscar_mm.errors import InputError
from oscar_mm.modality import Modality
from oscar_mm.ops.pack import pack
from oscar_mm.ops.unpack import unpack
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat
from oscar_mm.policy import DEFAULT, KVPolicy
from oscar_mm.quant.basis import Basis, sigma_from_prompt


@dataclass(frozen=True)
class Roundtrip:
    """Result of ``roundtrip``.

    Attributes:
        k: keys, shape and dtype of the input.
        v: values, shape and dtype of the input.
        bits_per_value: bits of the packed pages per stored element, the mean over pages of
            different widths; the dtype's bits if no page was full.
        pages: number of packed pages, over batch and modalities.
    """

    k: torch.Tensor
    v: torch.Tensor
    bits_per_value: float
    pages: int


def roundtrip(
    k: torch.Tensor,
    v: torch.Tensor,
    policy: str | KVPolicy = DEFAULT,
    modality: str | Modality | torch.Tensor | None = None,
    *,
    q: torch.Tensor | None = None,
) -> Roundtrip:
    """Pack keys and values into pages and read them back, as the cache does in one layer.

    Every full page of each modality is packed; an incomplete last page stays as it is. Window and
    sinks of the policy are not applied.

    Args:
        k: (batch, KV heads, tokens, head_dim), float32, bfloat16 or float16, after RoPE.
        v: (batch, KV heads, tokens, head_dim), the dtype of ``k``.
        policy: a KVPolicy or a preset's name.
        modality: one for all tokens ("text", Modality.IMAGE, ...), or ids of each token as a
            (tokens,) or (batch, tokens) tensor (0 text, 1 image, 2 video, 3 audio). Text by
            default.
        q: (batch, query heads, tokens, head_dim) queries for balancing; without them keys are not
            balanced.

    Raises:
        InputError: shapes or dtypes do not fit, or keys or values are NaN, infinite or out of
            range.
    """
    policy = KVPolicy.of(policy)
    _check(k, v, q)
    batch, kv_heads, tokens, head_dim = k.shape
    ids = _modality_ids(modality, batch, tokens)
    sigma = None
    if q is not None and policy.balance is not None:
        sigma = sigma_from_prompt(q, k, centered=not policy.by_token)
    basis = Basis(head_dim, policy.rotate, sigma)
    keys, values, stored_bytes, pages = k.clone(), v.clone(), 0, 0
    for row in range(batch):
        for kind in Modality:
            bits = policy.bits_for(kind)
            where = (ids[row] == int(kind)).nonzero()[:, 0].to(k.device)
            full = where.numel() // PAGE_TOKENS
            if not bits.packed or not full:
                continue
            where = where[: full * PAGE_TOKENS]
            page_format = PageFormat.of(policy, bits, kv_heads, head_dim)
            try:
                of_keys, of_values = (_as_pages(x[row][:, where]) for x in (k, v))
                packed = pack(of_keys, of_values, page_format, policy, basis)
            except FloatingPointError as error:
                raise InputError(
                    f"roundtrip: batch row {row}, {kind.label} tokens: {error}"
                ) from None
            restored = unpack(packed, page_format, basis, k.dtype)
            for target, pages_of_side in zip((keys, values), restored, strict=True):
                target[row][:, where] = pages_of_side.transpose(0, 1).flatten(1, 2)
            stored_bytes += packed.nbytes
            pages += full
    elements = 2 * pages * PAGE_TOKENS * kv_heads * head_dim
    bits_per_value = stored_bytes * 8 / elements if pages else k.dtype.itemsize * 8.0
    return Roundtrip(keys, values, bits_per_value, pages)


def _as_pages(x: torch.Tensor) -> torch.Tensor:
    """(KV heads, pages * 128, head_dim) -> (pages, KV heads, 128, head_dim)."""
    return x.unflatten(1, (-1, PAGE_TOKENS)).transpose(0, 1)


def _check(k: torch.Tensor, v: torch.Tensor, q: torch.Tensor | None) -> None:
    for name, tensor in (("k", k), ("v", v), ("q", q)):
        if not isinstance(tensor, torch.Tensor) and not (name == "q" and q is None):
            raise InputError(f"roundtrip: {name} must be a tensor, not {type(tensor).__name__}")
    if k.ndim != 4 or k.shape != v.shape or k.dtype != v.dtype:
        raise InputError(
            f"roundtrip: k {tuple(k.shape)} {k.dtype} and v {tuple(v.shape)} {v.dtype} must both "
            "be (batch, KV heads, tokens, head_dim) of one dtype"
        )
    if k.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise InputError(f"roundtrip: dtype {k.dtype}: must be float32, bfloat16 or float16")
    for name, tensor in (("k", k), ("v", v)):
        if not bool(tensor.isfinite().all()):
            raise InputError(f"roundtrip: {name} holds NaN or infinity")
    if q is not None and (
        q.ndim != 4
        or (q.shape[0], q.shape[2], q.shape[3]) != (k.shape[0], k.shape[2], k.shape[3])
        or q.shape[1] % k.shape[1]
    ):
        raise InputError(
            f"roundtrip: q {tuple(q.shape)} must be (batch, a multiple of {k.shape[1]} heads, "
            f"tokens, head_dim) for k {tuple(k.shape)}"
        )


def _modality_ids(
    modality: str | Modality | torch.Tensor | None, batch: int, tokens: int
) -> torch.Tensor:
    if isinstance(modality, torch.Tensor):
        if modality.shape not in ((tokens,), (batch, tokens)):
            raise InputError(
                f"roundtrip: modality {tuple(modality.shape)} must be ({tokens},) or "
                f"({batch}, {tokens})"
            )
        if not set(modality.unique().tolist()) <= set(Modality):
            raise InputError("roundtrip: modality ids must be 0 text, 1 image, 2 video, 3 audio")
        return modality.to("cpu").expand(batch, tokens)
    if isinstance(modality, str):
        if modality.upper() not in Modality.__members__:
            names = ", ".join(kind.label for kind in Modality)
            raise InputError(f"roundtrip: modality {modality!r}: must be one of {names}")
        modality = Modality[modality.upper()]
    try:
        kind = Modality(modality or Modality.TEXT)
    except ValueError:
        raise InputError(
            f"roundtrip: modality {modality!r}: must be 0 text, 1 image, 2 video or 3 audio"
        ) from None
    return torch.full((batch, tokens), int(kind))
