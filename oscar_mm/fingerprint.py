"""Fingerprints: which model a saved cache belongs to, and which settings a processor has."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Set
from typing import Any

import numpy as np
import torch

from oscar_mm.ranks import Ranks, own_part

_SAMPLES = 64
_CONFIG = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "hidden_act", "rms_norm_eps", "rope_parameters"),
    *("sliding_window", "max_position_embeddings"),
)
"""Fields of the text model's configuration that decide how keys and values are made and read."""


@torch.no_grad()
def model_fingerprint(model: Any) -> str:
    """Model type, dtype and a SHA-256 digest, which tell checkpoints apart.

    The digest covers the part of the text model's configuration that concerns the cache, and the
    shape and 64 values at fixed places (all of a smaller one) of every parameter. So another
    checkpoint, a fine-tuned one or one in other bits has another fingerprint; a change of single
    weights outside the samples goes unnoticed. Names of parameters and devices do not count: a
    checkpoint has one fingerprint with all versions of transformers.

    Each rank has its own fingerprint, because it has its own heads.

    Args:
        model: a generative model of transformers.
    """
    sampled = []
    for parameter in model.parameters():
        flat = own_part(parameter).detach().reshape(-1)
        places = torch.arange(min(_SAMPLES, len(flat)), device=flat.device)
        sampled.append((tuple(parameter.shape), flat[places * len(flat) // max(1, len(places))]))
    digests = sorted(
        hashlib.sha256(f"{shape}\n".encode() + values.float().cpu().numpy().tobytes()).digest()
        for shape, values in sampled
    )
    config = model.config.get_text_config().to_dict()
    about = json.dumps({name: config.get(name) for name in _CONFIG}, sort_keys=True, default=str)
    digest = hashlib.sha256(about.encode() + b"".join(digests)).hexdigest()
    kind = f"{model.config.model_type} {str(model.dtype).removeprefix('torch.')}"
    ranks = Ranks.of(model)
    return f"{kind} {digest}" if ranks.count == 1 else f"{kind} {ranks} {digest}"


def attributes_digest(value: Any) -> str:
    """SHA-256 of an object's attributes and items, down to the content of its arrays.

    The order of attributes and of a mapping's items does not count, the class of an object does. A
    value without attributes and items counts as its ``repr``.

    Args:
        value: nested objects, mappings, sequences, arrays and tensors, without cycles.

    Returns:
        64 hexadecimal digits.
    """
    return hashlib.sha256(json.dumps(_described(value), sort_keys=True).encode()).hexdigest()


def _described(value: Any) -> Any:
    """The JSON value that stands for a value."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().flatten()
        return [str(value.dtype), list(value.shape), _described(flat.view(torch.uint8).numpy())]
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        content = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        return [str(value.dtype), list(value.shape), content]
    if isinstance(value, Mapping):
        return {repr(key): _described(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_described(item) for item in value]
    if isinstance(value, Set):
        return sorted(map(repr, value))
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return repr(value)
    return [f"{type(value).__module__}.{type(value).__qualname__}", _described(vars(value))]
