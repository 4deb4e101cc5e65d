"""Save a cache to a file and load it again: pages, tails and tables, bit for bit.

Tensors of the file (slots are renumbered from 0; a slot that sequences share is written once):

    codes                (rows, tokens) uint8       stream code of every token
    streams              (n, 4) int64               row, stream code, entries, tokens of the tail
    entries              (entries, 3) int32         page, first token in use, the one after the last
    blocks               (blocks,) int32            of the tails, stream by stream
    layer.<i>.pages.<b>  (pages, page_bytes) uint8  see ``oscar_mm.cache.layout``
    layer.<i>.blocks     (blocks, 2, KV heads, 32, head_dim)
    layer.<i>.sigma      (KV heads or 1, head_dim) float32, only with balancing
    given.<name>         tensors of the caller

and one text, JSON: format version, the model's fingerprint, policy, layers, what the caller gave.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.checked_file import read_checked, write_checked
from oscar_mm.cache.layer import OscarLayer
from oscar_mm.cache.layout import BLOCK_TOKENS, PageFormat
from oscar_mm.cache.saved_tables import SavedTables, renumbered
from oscar_mm.cache.store import PageStore
from oscar_mm.errors import InputError
from oscar_mm.policy import KVPolicy

FORMAT_VERSION = 1
"""Goes up with any change of this file's tensors or of the bytes of a page."""
_ADDED = {"value_scale": "plain"}
"""Fields of the policy that older files do not name, as their pages were made."""
_TEXT = "oscar_mm.cache"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_MAX_LAYERS, _MAX_HEADS, _MAX_HEAD_DIM = 1024, 1024, 1024

Device = torch.device | str


def save_cache(
    cache: OscarCache,
    path: str | Path,
    *,
    fingerprint: str,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write a cache to one safetensors file, as a whole or not at all.

    Only slots in use are written. What has been forgotten of a page that is still in use is in its
    codes.

    Args:
        path: is replaced if it exists.
        fingerprint: of the model; only a model with the same one can go on from the file.
        metadata: the caller's own, by name: tensors, arrays, or what JSON can hold.

    Raises:
        InputError: the file cannot be written, or metadata cannot be saved.
        RuntimeError: in the middle of a forward pass, or after one that was interrupted.
    """
    cache.check_complete()
    tables, slots = renumbered(cache.ledger)
    tensors, plain = dict(tables.tensors()), {}
    for name, value in (metadata or {}).items():
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value.copy())
        if isinstance(value, torch.Tensor):
            tensors[f"given.{name}"] = value.detach().cpu().contiguous().clone()
        else:
            plain[name] = value
    layers = []
    for layer in cache.layers:
        for bits, pool in layer.pages.items():
            tensors[f"layer.{layer.index}.pages.{bits}"] = pool.storage[slots[bits]].cpu()
        blocks = layer.blocks.storage[slots[16]].cpu()
        for index, used in tables.partial_blocks().items():
            blocks[index, :, :, used:] = 0  # Never written, or another's before.
        tensors[f"layer.{layer.index}.blocks"] = blocks
        if layer.sigma is not None:
            tensors[f"layer.{layer.index}.sigma"] = layer.sigma.cpu().contiguous().clone()
        layers.append({"balanced": layer.sigma_is_final, "page_order": _page_order(layer)})
    text = {
        "version": FORMAT_VERSION,
        "fingerprint": fingerprint,
        "policy": {**dataclasses.asdict(cache.policy), "bits": cache.policy.bits._asdict()},
        "layers": layers,
        "given": plain,
    }
    try:
        dumped = json.dumps(text, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: metadata cannot be saved as JSON: {error}") from None
    write_checked(path, tensors, {_TEXT: dumped})


def load_cache(
    path: str | Path,
    *,
    fingerprint: str,
    policy: str | KVPolicy | None = None,
    store: PageStore | None = None,
    device: Device | Mapping[int, Device] = "cpu",
) -> tuple[OscarCache, dict[str, Any]]:
    """A cache as it was saved, with slots of its own, and the caller's metadata.

    Args:
        fingerprint: of the model that is to go on with it.
        policy: the policy that it must have; the store's, or any, by default.
        store: where its pages go; by default a store of its own.
        device: of the layers that the store does not have yet; by layer index where they differ.

    Raises:
        InputError: the file is no saved cache, of an unknown version, of another model or policy,
            truncated or altered, or does not fit the store.
    """
    wanted = KVPolicy.of(policy) if policy is not None else store and store.policy

    def accept(texts: dict[str, str]) -> None:
        _check_text(_text_of(texts, path), path, fingerprint, wanted)

    tensors, texts = read_checked(path, accept)
    text = _text_of(texts, path)
    found = _policy_of(text, path)
    try:
        tables = SavedTables.of(tensors, found)
        shapes = _checked_shapes(tensors, text, found, tables)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: is damaged: {error}") from None
    cache = OscarCache(found, store=store)
    try:
        _fill(cache, tensors, text, tables, shapes, device)
    except InputError as error:
        cache.close()
        raise InputError(f"{path}: {error}") from None
    except BaseException:
        cache.close()
        raise
    given = {name[6:]: x.clone() for name, x in tensors.items() if name.startswith("given.")}
    return cache, text["given"] | given


def _fill(
    cache: OscarCache,
    tensors: dict[str, torch.Tensor],
    text: dict[str, Any],
    tables: SavedTables,
    shapes: list[tuple[int, int, torch.dtype]],
    device: Device | Mapping[int, Device],
) -> None:
    """Take slots of the cache's store and copy a checked file's content into them."""
    for index, shape in enumerate(shapes):
        layer = OscarLayer(cache, index)
        cache.layers.append(layer)
        there = cache.store.layers.get(index)
        own = device[index] if isinstance(device, Mapping) else device
        layer.use_pools(*shape, there.device if there is not None else _exact(own))
        layer.sigma_is_final = text["layers"][index]["balanced"]
        sigma = tensors.get(f"layer.{index}.sigma")
        layer.sigma = None if sigma is None else sigma.to(layer.device, copy=True)
    ids = {
        bits: slots.allocate(tables.counts[bits]) for bits, slots in cache.store.allocators.items()
    }
    cache.ledger.hold(tables.sequences(ids))
    for bits, slots in ids.items():
        cache.store.allocators[bits].release(slots)
    for layer in cache.layers:
        pools = {**layer.pages, 16: layer.blocks}
        for bits, pool in pools.items():
            name = "blocks" if bits == 16 else f"pages.{bits}"
            pool.reserve(cache.store.allocators[bits].capacity)
            pool.storage[ids[bits]] = tensors[f"layer.{layer.index}.{name}"].to(layer.device)
        layer.steps = 1
    cache.ledger.steps = int(bool(cache.layers))


def _exact(device: Device) -> torch.device:
    """With an index, as tensors name theirs."""
    return torch.empty(0, device=device).device


def _page_order(layer: OscarLayer) -> str:
    formats = layer.formats.values()
    return "fragments" if any(page.in_fragments for page in formats) else "plain"


def _text_of(texts: dict[str, str], path: str | Path) -> dict[str, Any]:
    try:
        text = json.loads(texts[_TEXT])
        if isinstance(text["version"], int) and isinstance(text["given"], dict):
            return text
    except (LookupError, TypeError, ValueError, RecursionError):
        pass
    raise InputError(f"{path}: is a safetensors file, but no saved cache")


def _check_text(
    text: dict[str, Any], path: str | Path, fingerprint: str, policy: KVPolicy | None
) -> None:
    if text["version"] != FORMAT_VERSION:
        raise InputError(
            f"{path}: has format version {text['version']}; this version of oscar_mm reads "
            f"{FORMAT_VERSION}"
        )
    if text.get("fingerprint") != fingerprint:
        raise InputError(
            f"{path}: was saved with another model (fingerprint {text.get('fingerprint')!s:.80}, "
            f"here {fingerprint!s:.80}); load it with the same one"
        )
    found = _policy_of(text, path)
    if policy is not None and found != policy:
        fields = (field.name for field in dataclasses.fields(KVPolicy))
        both = [(name, getattr(found, name), getattr(policy, name)) for name in fields]
        differ = [f"{name}={a!r}, here {b!r}" for name, a, b in both if a != b]
        raise InputError(f"{path}: was saved with another policy: {'; '.join(differ)}")


def _policy_of(text: dict[str, Any], path: str | Path) -> KVPolicy:
    names = {field.name for field in dataclasses.fields(KVPolicy)}
    policy = text.get("policy")
    if not isinstance(policy, dict) or set(policy) | _ADDED.keys() != names:
        raise InputError(f"{path}: is damaged: it names no policy")
    try:
        return KVPolicy(**_ADDED | policy)
    except InputError as error:
        raise InputError(f"{path}: is damaged: {error}") from None


def _checked_shapes(
    tensors: dict[str, torch.Tensor], text: dict[str, Any], policy: KVPolicy, tables: SavedTables
) -> list[tuple[int, int, torch.dtype]]:
    """KV heads, head_dim and dtype of every layer; ValueError if any tensor is not what it says."""
    layers = text["layers"]
    if len(layers) > _MAX_LAYERS or (tables.counts[16] and not layers):
        raise ValueError(f"{len(layers)} layers")
    shapes = []
    expected = {name for name in tensors if not name.startswith("layer.")}
    for index, about in enumerate(layers):
        blocks = tensors[f"layer.{index}.blocks"]
        _, _, heads, _, width = blocks.shape
        if not (1 <= heads <= _MAX_HEADS and 1 <= width <= _MAX_HEAD_DIM):
            raise ValueError(f"layer {index}: {heads} KV heads of {width} channels")
        wanted = {"blocks": ((tables.counts[16], 2, heads, BLOCK_TOKENS, width), _DTYPES)}
        for bits in set(policy.bits) - {16}:
            page = PageFormat.of(policy, bits, heads, width)
            wanted[f"pages.{bits}"] = ((tables.counts[bits], page.page_bytes), (torch.uint8,))
            if about["page_order"] != ("fragments" if page.in_fragments else "plain"):
                raise ValueError(f"layer {index}: its pages are in another order")
        sigma = tensors.get(f"layer.{index}.sigma")
        if sigma is not None:
            rows = heads if len(sigma) > 1 else 1
            wanted["sigma"] = ((rows, width), (torch.float32,))
            if not bool((sigma.isfinite() & (sigma > 0)).all()):
                raise ValueError(f"layer {index}: sigma is not positive")
        for name, (shape, dtypes) in wanted.items():
            tensor = tensors[f"layer.{index}.{name}"]
            if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
                raise ValueError(f"layer {index}: {name} is {tuple(tensor.shape)} {tensor.dtype}")
            expected.add(f"layer.{index}.{name}")
        if not isinstance(about["balanced"], bool):
            raise ValueError(f"layer {index}: balanced is {about['balanced']!r}")
        shapes.append((heads, width, blocks.dtype))
    if expected != set(tensors):
        raise ValueError(f"unknown tensors {sorted(set(tensors) - expected)[:3]}")
    return shapes
