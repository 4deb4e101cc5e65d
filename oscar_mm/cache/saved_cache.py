"""Save a cache to a file and load it again, bit for bit: pages, unpacked tokens and tables.

The file contains these tensors (slots are renumbered from 0; a shared slot is written once):

    codes                (rows, tokens) uint8       stream code of every token
    streams              (n, 4) int64               row, stream code, entries, 16-bit tokens
    entries              (entries, 3) int32         page, first token in use, end (exclusive)
    recent               (tokens,) int32            16-bit slots, stream by stream
    layer.<i>.pages.<b>  (pages, page_bytes) uint8  see ``oscar_mm.pages.layout``
    layer.<i>.recent     (slots, 2, KV heads, head_dim)
    layer.<i>.sigma      (KV heads or 1, head_dim) float32, only with query-key balancing
    layer.<i>.conv.<k>   (rows, channels, kernel)   states of a linear-attention layer: copy k
    layer.<i>.state.<k>  (rows, ...) float32        belongs to the k-th of the lengths in the JSON
    given.<name>         tensors supplied by the caller

The file also contains a JSON text: the format version, the model's fingerprint, the policy, the
layers, the lengths for which there are states (the last is that of the cache) and the caller's
metadata.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.checked_file import Content, Kind, read_checked, write_checked
from oscar_mm.cache.layer import OscarLayer
from oscar_mm.cache.page_store import LayerShape, PageStore, unpacked_dtype
from oscar_mm.cache.snapshot import fill
from oscar_mm.cache.states import LinearLayer, Marks, StateShape
from oscar_mm.cache.tables_file import SavedTables, renumbered
from oscar_mm.cache.window_pages import ZEROS
from oscar_mm.errors import InputError
from oscar_mm.pages.codecs.registry import codec_of
from oscar_mm.pages.layout import PageFormat, all_finite
from oscar_mm.policy import PLAIN, WHOLE_HEAD, Bits, KVPolicy

FORMAT_VERSION = 2
"""Version number, increased with any change to the file's tensors or to the bytes of a page."""
ADAPTER_SEPARATOR = " adapter "
"""Text between the fingerprint of a model and that of its adapter."""
_ADDED: dict[str, Any] = {"value_scale": "plain", "center": False}
"""Policy fields that older files lack, with the values that their pages were packed with."""
_TEXT = "oscar_mm.cache"
_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_LAYERS, _MAX_HEADS, _MAX_HEAD_DIM, _MAX_GIVEN = 1024, 1024, 1024, 64
_CHECKED_BYTES = 1 << 26
"""Number of bytes of pages or tokens that are checked at a time."""
_MOST = 512.0
"""Upper bound of sigma and of its inverse (``oscar_mm.quant.balance``)."""
_SHOWN = 200
"""Maximum number of characters shown from an error about a file."""

_STATE = re.compile(r"layer\.\d+\.(conv|state)\.\d+")

Device = torch.device | str
Shape = LayerShape | StateShape


def save_cache(
    cache: OscarCache,
    path: str | Path,
    *,
    fingerprint: str,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write a cache to a safetensors file, atomically.

    Args:
        cache: cache to save.
        path: file to write or replace.
        fingerprint, metadata: see ``cache_content``.

    Raises:
        InputError: if the file cannot be written, or the metadata cannot be saved as JSON.
        RuntimeError, NotImplementedError: see ``cache_content``.
    """
    content = cache_content(cache, path, fingerprint=fingerprint, metadata=metadata)
    write_checked(path, *content)


def cache_content(
    cache: OscarCache,
    path: str | Path,
    *,
    fingerprint: str,
    metadata: Mapping[str, Any] | None = None,
) -> Content:
    """Copy what a cache's file will contain to the host.

    Any thread may then write the content with ``write_checked``. Only slots in use are copied. In
    pages to which tokens are appended (``PageCodec.appends_tokens``), unused token positions are
    cleared; in other pages, forgotten tokens remain part of the codes.

    Args:
        cache: cache to save.
        path: path of the file, for error messages.
        fingerprint: fingerprint of the model; only a model with the same fingerprint can load the
            file.
        metadata: the caller's values by name: tensors, arrays or JSON values.

    Raises:
        InputError: if the metadata cannot be saved as JSON.
        RuntimeError: during a forward pass, or after an interrupted one.
        NotImplementedError: if a layer has a linear-attention state of another kind than a Gated
            DeltaNet.
    """
    cache.check_complete()
    if not all(map(_is_savable, cache.linear_layers)):
        raise NotImplementedError(
            f"{path}: the cache cannot be saved because of its linear-attention states: only those "
            "of Gated DeltaNet layers (Qwen3-Next, Qwen3.5) can be"
        )
    tables, slots = renumbered(cache.kv_manager)
    tensors, plain = dict(tables.tensors()), {}
    for name, value in (metadata or {}).items():
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value.copy())
        if isinstance(value, torch.Tensor):
            tensors[f"given.{name}"] = value.detach().cpu().contiguous().clone()
        else:
            plain[name] = value
    layers, in_use, lacks_pages = list[dict[str, Any]](), tables.places_in_use(), False
    states = _states_of(cache)
    # A cache without tokens is saved without the layers of states, as one that never had tokens.
    for index, layer in enumerate(cache.layers if states or not cache.linear_layers else ()):
        if isinstance(layer, LinearLayer):
            for number, copies in enumerate(states.values()):
                tensors.update(zip(_state_names(index, number), copies[index].states, strict=True))
            layers.append({"states": True})
            continue
        for bits, pool in layer.pages.items():
            indices = layer.pool_indices(bits, slots[bits])
            lacks_pages |= layer.places is not None and ZEROS in indices
            pages = pool.storage[indices].cpu()
            # Unused positions were never written, or contain forgotten tokens.
            layer.formats[bits].clear_unused(pages, in_use[bits])
            tensors[f"layer.{layer.index}.{_name(bits)}"] = pages
        recent = layer.recent.storage[slots[PLAIN]].cpu()
        tensors[f"layer.{layer.index}.{_name(PLAIN)}"] = recent
        if layer.sigma is not None:
            tensors[f"layer.{layer.index}.sigma"] = layer.sigma.cpu().contiguous().clone()
        layers.append(
            {
                "balanced": True,
                "page_order": _page_order(layer.formats.values()),
                "dtype": _DTYPE_NAMES[layer.dtype],
            }
        )
    text = {
        "version": FORMAT_VERSION,
        "fingerprint": fingerprint,
        "policy": {**dataclasses.asdict(cache.policy), "bits": cache.policy.bits._asdict()},
        "layers": layers,
        "given": plain,
    }
    if states:
        text["states"] = list(states)
    elif cache.marks.kept:
        text["windows"] = sorted(length for length in cache.marks.kept if length)
    if lacks_pages:
        text["lacks_pages"] = True
    try:
        dumped = json.dumps(text, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: metadata cannot be saved as JSON: {error}") from None
    return tensors, {_TEXT: dumped}


def _is_savable(layer: LinearLayer) -> bool:
    convolution, recurrent = layer.conv_states[0], layer.recurrent_states[0]
    if convolution is None or recurrent is None:
        return not layer.states
    dimensions = convolution.ndim, recurrent.ndim
    return dimensions == (3, 4) and recurrent.dtype == torch.float32


def _states_of(cache: OscarCache) -> dict[int, dict[int, LinearLayer]]:
    """Return length -> layer index -> copy of the layer on the host, in ascending order of lengths;
    empty if the cache has no states."""
    by_length = {**cache.marks.kept, cache.get_seq_length(): cache.linear_by_index}
    return {
        length: {index: layer.on(torch.device("cpu")) for index, layer in layers.items()}
        for length, layers in sorted(by_length.items())
        if length and layers
    }


def _state_names(index: int, number: int) -> tuple[str, str]:
    return f"layer.{index}.conv.{number}", f"layer.{index}.state.{number}"


@dataclass(frozen=True)
class SavedCache:
    """Checked content of a file. Any thread may read a file, since no store is accessed.

    Attributes:
        policy: policy of the cache.
        tables: tables of its sequences.
        tensors: tensors of all layers, by name.
        shapes: shapes of the layers.
        lengths: lengths for which there are states, in ascending order.
        windows: lengths at which sliding windows are kept, of a cache without states.
        lacks_pages: whether layers with sliding windows had freed pages of the cache.
        given: the caller's metadata.
        fingerprint: fingerprint of the model that the file belongs to.
    """

    policy: KVPolicy
    tables: SavedTables
    tensors: dict[str, torch.Tensor]
    shapes: list[Shape]
    lengths: list[int]
    windows: list[int]
    lacks_pages: bool
    given: dict[str, Any]
    fingerprint: str

    @classmethod
    def read(
        cls,
        path: str | Path,
        *,
        fingerprint: str | Mapping[str, str | None],
        policy: str | KVPolicy | None = None,
        layers: Sequence[Shape] | None = None,
    ) -> SavedCache:
        """Read and check a file, which need not be trusted: its header is checked first.

        Args:
            path: file written by ``save_cache``.
            fingerprint: fingerprint of the model that will continue the cache, which the file must
                have; or several, of which it must have one, with the names of their adapters. The
                first is that of the model without an adapter, with the name None.
            policy: policy that the cache must have; by default, any.
            layers: layer shapes that the cache must have; by default, any.

        Raises:
            InputError: if the file is not a saved cache, has an unknown version, belongs to another
                model or policy, is truncated or altered, or has content that no valid cache has.
        """
        wanted = None if policy is None else KVPolicy.of(policy)
        accepted: list[tuple[dict[str, Any], KVPolicy, list[Shape]]] = []

        def accept(texts: dict[str, str], kinds: dict[str, Kind]) -> None:
            text = _text_of(texts, path)
            _check_text(text, path, fingerprint)
            found = _policy_of(text, path)
            with _as_damaged(path):
                found = _with_names(found, wanted, kinds)
            _check_policy(found, wanted, path)
            with _as_damaged(path):
                accepted.append((text, found, _checked_shapes(kinds, text, found, layers)))

        tensors, _ = read_checked(path, accept)
        [(text, found, shapes)] = accepted
        with _as_damaged(path):
            # Earlier files store 16-bit tokens in the model's dtype, which may be larger.
            for index, shape in _with_keys(shapes):
                name = f"layer.{index}.{_name(PLAIN)}"
                tensors[name] = tensors[name].to(unpacked_dtype(found, shape.dtype))
            tables = SavedTables.of(tensors, found)
            _check_content(tensors, found, tables, shapes)
            _check_lengths(text.get("states", []), tables, shapes)
            windows = _lengths_of(text, "windows")
            if windows != sorted(set(windows)) or windows[-1:] > [tables.codes.shape[1]]:
                raise ValueError("the lengths of its windows do not match its tokens")
            if not isinstance(lacks_pages := text.get("lacks_pages", False), bool):
                raise ValueError("lacks_pages is neither true nor false")
            _check_balancing(tensors, found, tables, text["layers"])
        return cls(
            policy=found,
            tables=tables,
            tensors={name: x for name, x in tensors.items() if name.startswith("layer.")},
            shapes=shapes,
            lengths=text.get("states", []),
            windows=windows,
            lacks_pages=lacks_pages,
            given=text["given"]
            | {name[6:]: x.clone() for name, x in tensors.items() if name.startswith("given.")},
            fingerprint=text["fingerprint"],
        )

    @property
    def bytes(self) -> int:
        """Size in bytes of pages, of tokens in 16-bit precision, and of states."""
        return sum(x.nbytes for name, x in self.tensors.items() if not name.endswith("sigma"))

    def placed(
        self, store: PageStore | None = None, device: Device | Mapping[int, Device] = "cpu"
    ) -> OscarCache:
        """Return a cache with a copy of the content in new slots.

        Args:
            store: page store for the slots; by default, a new store.
            device: device for the layers that the store does not have yet; a mapping from layer
                index to device if there are several devices.

        Raises:
            InputError: if the store is for another model or policy, or keeps pages that this cache
                lacks.
        """
        if self.lacks_pages and (store is None or not store.windows):
            raise InputError(
                "the saved cache lacks pages that no sliding window reached any more, but here all "
                "pages are kept: load it in a pipeline without tensor parallelism"
            )
        cache = OscarCache(self.policy, store=store)
        try:
            self._fill(cache, device)
        except BaseException:
            cache.close()
            raise
        return cache

    def _fill(self, cache: OscarCache, device: Device | Mapping[int, Device]) -> None:
        kept: dict[int, dict[int, LinearLayer]] = {length: {} for length in self.lengths}
        for index, shape in enumerate(self.shapes):
            own = device[index] if isinstance(device, Mapping) else device
            if isinstance(shape, StateShape):
                for number, length in enumerate(self.lengths):
                    state = [self.tensors[name] for name in _state_names(index, number)]
                    kept[length][index] = LinearLayer.of(*state).on(_exact(own))
                cache.layers.append(LinearLayer())
                continue
            layer = OscarLayer(cache, index)
            cache.layers.append(layer)
            there = cache.store.layers.get(index)
            layer.use_pools(*shape, there.device if there is not None else _exact(own))
            sigma = self.tensors.get(f"layer.{index}.sigma")
            layer.sigma = None if sigma is None else sigma.to(layer.device, copy=True)
        if self.lengths:
            cache.set_states(kept.pop(self.lengths[-1]), Marks(kept))
        else:
            cache.marks = Marks({length: {} for length in self.windows})
        fill(cache, self.tables, self._slots_of)

    def _slots_of(self, layer: OscarLayer) -> dict[Bits, torch.Tensor]:
        kinds = (*self.policy.packed_bits, PLAIN)
        return {bits: self.tensors[f"layer.{layer.index}.{_name(bits)}"] for bits in kinds}


def load_cache(
    path: str | Path,
    *,
    fingerprint: str,
    policy: str | KVPolicy | None = None,
    store: PageStore | None = None,
    device: Device | Mapping[int, Device] = "cpu",
) -> tuple[OscarCache, dict[str, Any]]:
    """Load a saved cache into new slots and return it with the caller's metadata.

    Args:
        path: file written by ``save_cache``.
        fingerprint: fingerprint of the model that will continue the cache.
        policy: policy that the cache must have; by default, the policy of the store, or any policy
            without a store.
        store: page store for the slots; by default, a new store.
        device: device for the layers that the store does not have yet; a mapping from layer index
            to device if there are several devices.

    Raises:
        InputError: see ``SavedCache.read`` and ``SavedCache.placed``.
    """
    wanted = policy if policy is not None else store and store.policy
    saved = SavedCache.read(path, fingerprint=fingerprint, policy=wanted)
    try:
        return saved.placed(store, device), saved.given
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _name(bits: Bits) -> str:
    return "recent" if bits == PLAIN else f"pages.{'.'.join(str(bits).split('/'))}"


@contextmanager
def _as_damaged(path: str | Path) -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path} is damaged: {str(error)[:_SHOWN]}") from None


def _exact(device: Device) -> torch.device:
    """Return the device with its index, like a tensor's attribute ``device``."""
    return torch.empty(0, device=device).device


def _page_order(formats: Iterable[PageFormat]) -> str:
    return "fragments" if any(page.in_fragments for page in formats) else "plain"


def _text_of(texts: dict[str, str], path: str | Path) -> dict[str, Any]:
    try:
        text = json.loads(texts[_TEXT])
        if isinstance(text["version"], int) and isinstance(text["given"], dict):
            return text
    except (LookupError, TypeError, ValueError, RecursionError):
        pass
    raise InputError(f"{path} is a safetensors file, but not a saved cache")


def _check_text(
    text: dict[str, Any], path: str | Path, fingerprint: str | Mapping[str, str | None]
) -> None:
    if text["version"] != FORMAT_VERSION:
        raise InputError(
            f"{path} has format version {str(text['version'])[:20]}; this version of oscar_mm "
            f"reads {FORMAT_VERSION}"
        )
    known = {fingerprint: None} if isinstance(fingerprint, str) else fingerprint
    # The file's value may have a type that cannot be hashed, so it is not looked up in a dict.
    if (found := text.get("fingerprint")) in list(known):
        return
    here = next(iter(known))
    own, _, adapter = str(found).partition(ADAPTER_SEPARATOR)
    if own == here and adapter:
        loaded = [
            f"{name!r} ({_short(one.partition(ADAPTER_SEPARATOR)[2])})"
            for one, name in known.items()
            if name is not None
        ]
        raise InputError(
            f"{path} was saved with an adapter of this model that is not loaded (fingerprint "
            f"{_short(adapter)}; loaded: {', '.join(loaded) or 'none'}): load that adapter too"
        )
    raise InputError(
        f"{path} was saved with another model (fingerprint {_short(str(found))}, here "
        f"{_short(here)}): load it with the same model and adapter"
    )


def _short(fingerprint: str) -> str:
    """Return a fingerprint for a message, with the first 12 digits of each SHA-256 digest."""
    return re.sub("[0-9a-f]{64}", lambda digest: digest[0][:12], fingerprint)[:_SHOWN]


def _check_policy(found: KVPolicy, policy: KVPolicy | None, path: str | Path) -> None:
    if policy is not None and found != policy:
        if found.name is not None and policy.name is not None:
            raise InputError(
                f"{path} was saved with policy {found.name!r}, but here it is {policy.name!r}: "
                f"choose policy={found.name!r} to load it"
            )
        fields = (field.name for field in dataclasses.fields(KVPolicy))
        both = [(name, getattr(found, name), getattr(policy, name)) for name in fields]
        differ = [f"{name}={a!r}, here {b!r}" for name, a, b in both if a != b]
        raise InputError(f"{path} was saved with another policy: {'; '.join(differ)}")


def _policy_of(text: dict[str, Any], path: str | Path) -> KVPolicy:
    names = {field.name for field in dataclasses.fields(KVPolicy)}
    policy = text.get("policy")
    if not isinstance(policy, dict) or set(policy) | _ADDED.keys() != names:
        raise InputError(f"{path} is damaged: it has no valid policy")
    try:
        return KVPolicy(**_ADDED | policy | _balance_now(policy))
    except InputError as error:
        raise InputError(f"{path} is damaged: {str(error)[:_SHOWN]}") from None


def _with_names(found: KVPolicy, wanted: KVPolicy | None, kinds: Mapping[str, Kind]) -> KVPolicy:
    """Return the policy of a file, with whole heads as key groups under the name that the caller
    uses: earlier files have a number that is at least the number of channels."""
    names = [name for name in kinds if re.fullmatch(r"layer\.\d+\.recent", name)]
    widths = [kinds[name].shape[3] for name in names]
    if not all(width > 0 for width in widths):
        raise ValueError("a layer has no channels")
    if wanted is not None and _whole_heads(found, widths) == _whole_heads(wanted, widths):
        return wanted
    return _whole_heads(found, widths) if widths else found


def _whole_heads(policy: KVPolicy, widths: Sequence[int]) -> KVPolicy:
    codec = codec_of(policy)
    whole = all(codec.key_group(policy.key_group, width) == width for width in widths)
    if codec.appends_tokens and whole:
        return dataclasses.replace(policy, key_group=WHOLE_HEAD)
    return policy


def _balance_now(policy: Mapping[str, Any]) -> dict[str, Any]:
    """Return the current value of ``balance`` for old policies that computed sigma from a prompt.

    Sigma itself is in the file.
    """
    return {"balance": "weights"} if policy.get("balance") in ("auto", "prompt") else {}


def _checked_shapes(
    kinds: dict[str, Kind],
    text: dict[str, Any],
    policy: KVPolicy,
    model: Sequence[Shape] | None,
) -> list[Shape]:
    """Check the header's tensors against each other and return the shapes of all layers.

    Raises:
        ValueError: if a tensor is unexpected or inconsistent with the others.
    """
    layers, rest = text["layers"], dict(kinds)
    # An empty cache has no layers yet.
    if len(layers) > _MAX_LAYERS or (model is not None and len(layers) not in (0, len(model))):
        raise ValueError(f"it has {len(layers)} layers")
    for name in [name for name in rest if name.startswith("given.")]:
        del rest[name]
    if len(kinds) - len(rest) > _MAX_GIVEN:
        raise ValueError(
            f"it has {len(kinds) - len(rest)} tensors from the caller, which are too many"
        )
    SavedTables.check_kinds(rest)
    slots: dict[Bits, int] = {}
    shapes = list[Shape]()
    copies = len(_lengths_of(text))
    for index, about in enumerate(layers):
        if "states" in about:
            shapes.append(_checked_states(rest, index, copies))
            if model is not None and shapes[-1] != model[index]:
                raise ValueError(f"layer {index}: the model has no such states")
            continue
        recent = rest[f"layer.{index}.{_name(PLAIN)}"]
        _, _, heads, width = recent.shape
        # Earlier files store 16-bit tokens in the model's dtype and do not name the dtype.
        dtype, stored = (_DTYPES.get(x) for x in (about.get("dtype", recent.dtype), recent.dtype))
        if dtype is None or stored not in (dtype, unpacked_dtype(policy, dtype)):
            raise ValueError(f"layer {index}: 16-bit tokens have dtype {recent.dtype}")
        if not (1 <= heads <= _MAX_HEADS and 1 <= width <= _MAX_HEAD_DIM):
            raise ValueError(f"layer {index}: {heads} KV heads of {width} channels are not valid")
        shape = LayerShape(heads, width, dtype)
        if model is not None and shape != model[index]:
            raise ValueError(
                f"layer {index}: the file has {shape}, but the model has {model[index]}"
            )
        wanted: dict[Bits, tuple[tuple[int, ...], str]] = {PLAIN: ((2, heads, width), recent.dtype)}
        formats = [PageFormat.of(policy, bits, heads, width) for bits in policy.packed_bits]
        for page in formats:
            wanted[page.bits] = ((page.page_bytes,), "U8")
        if formats and about["page_order"] != _page_order(formats):
            raise ValueError(f"layer {index}: its pages are not in the expected order")
        for bits, (slot, kind) in wanted.items():
            found = rest.pop(f"layer.{index}.{_name(bits)}")
            count = slots.setdefault(bits, found.shape[0])
            if found != Kind(kind, (count, *slot)):
                raise ValueError(
                    f"layer {index}: {_name(bits)} has invalid shape {found.shape} or "
                    f"dtype {found.dtype}"
                )
        sigma = rest.pop(f"layer.{index}.sigma", None)
        if sigma is not None and sigma not in (Kind("F32", (n, width)) for n in (1, heads)):
            raise ValueError(
                f"layer {index}: sigma has invalid shape {sigma.shape} or dtype {sigma.dtype}"
            )
        if not isinstance(about["balanced"], bool):
            raise ValueError(f"layer {index}: balanced is {about['balanced']!r}, not true or false")
        shapes.append(shape)
    if unknown := rest.keys() - SavedTables.KINDS.keys():
        raise ValueError(f"it has unknown tensors {sorted(unknown)[:3]}")
    return shapes


def _with_keys(shapes: Sequence[Shape]) -> Iterator[tuple[int, LayerShape]]:
    """Yield index and shape of the layers with keys and values."""
    for index, shape in enumerate(shapes):
        if isinstance(shape, LayerShape):
            yield index, shape


def _lengths_of(text: dict[str, Any], kind: str = "states") -> list[int]:
    lengths = text.get(kind, [])
    if not isinstance(lengths, list) or not all(type(one) is int and one > 0 for one in lengths):
        raise ValueError(f"the lengths of its {kind} are not positive whole numbers")
    return lengths


def _checked_states(rest: dict[str, Kind], index: int, copies: int) -> StateShape:
    """Remove the states of a layer from the header's tensors and return their shape.

    Raises:
        KeyError, ValueError: if they are missing, or not all of one valid shape and dtype.
    """
    if not copies:
        raise ValueError(f"layer {index}: its states are missing")
    kinds = [tuple(map(rest.pop, _state_names(index, number))) for number in range(copies)]
    convolution, recurrent = kinds[0]
    dtype, rows = _DTYPES.get(convolution.dtype), convolution.shape[:1]
    if dtype is None or recurrent.dtype != "F32" or {*kinds} != {kinds[0]}:
        raise ValueError(f"layer {index}: its states have unexpected shapes or dtypes")
    if len(convolution.shape) != 3 or len(recurrent.shape) != 4 or recurrent.shape[:1] != rows:
        raise ValueError(f"layer {index}: its states have an unexpected number of dimensions")
    return StateShape(convolution.shape[1:], recurrent.shape[1:], dtype)


def _check_lengths(lengths: list[int], tables: SavedTables, shapes: Sequence[Shape]) -> None:
    """Raise ValueError if the states do not belong to the tokens of the tables."""
    _, tokens = tables.codes.shape
    ascending = all(one < other for one, other in itertools.pairwise([0, *lengths]))
    has_states = any(isinstance(shape, StateShape) for shape in shapes)
    if not ascending or (lengths[-1:] != [tokens] if has_states else lengths):
        raise ValueError("the lengths of its states do not match its tokens")


def _check_content(
    tensors: dict[str, torch.Tensor],
    policy: KVPolicy,
    tables: SavedTables,
    shapes: Sequence[Shape],
) -> None:
    """Raise ValueError if the layers' slots do not match the tables, or contain NaN or infinity."""
    if tables.counts[PLAIN] and not shapes:
        raise ValueError("it has tokens, but no layers")
    for name, tensor in tensors.items():
        if _STATE.fullmatch(name) and not (len(tensor) == len(tables.codes) and all_finite(tensor)):
            raise ValueError(f"{name} contains NaN or infinity, or does not have every row")
    for index, shape in _with_keys(shapes):
        for bits, count in tables.counts.items():
            slots = tensors[f"layer.{index}.{_name(bits)}"]
            if len(slots) != count:
                shape_there = tuple(slots.shape)
                raise ValueError(
                    f"layer {index}: {_name(bits)} has shape {shape_there}, expected {count} slots"
                )
            page = None if bits == PLAIN else PageFormat.of(policy, bits, *shape[:2])
            for part in slots.split(max(1, _CHECKED_BYTES * count // max(1, slots.nbytes))):
                if not (all_finite(part) if page is None else page.all_finite(part.clone())):
                    raise ValueError(f"layer {index}: {_name(bits)} contains NaN or infinity")
        sigma = tensors.get(f"layer.{index}.sigma")
        if sigma is not None and not bool(((sigma > 1 / _MOST) & (sigma < _MOST)).all()):
            raise ValueError(f"layer {index}: sigma has values outside of the valid range")


def _check_balancing(
    tensors: dict[str, torch.Tensor],
    policy: KVPolicy,
    tables: SavedTables,
    layers: Sequence[Mapping[str, Any]],
) -> None:
    """Raise ValueError if a layer's pages and its balancing vectors are inconsistent."""
    has_pages = any(count for bits, count in tables.counts.items() if bits.packed)
    for index, about in enumerate(layers):
        if "states" in about:
            continue
        if has_pages and not about["balanced"]:
            raise ValueError(
                f"layer {index} has pages, but it is not known whether their keys are balanced"
            )
        if policy.balance is None and f"layer.{index}.sigma" in tensors:
            raise ValueError(
                f"layer {index} has a sigma, although the policy has no query-key balancing"
            )
