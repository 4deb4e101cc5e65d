"""Fingerprints: which model a saved cache belongs to, and how a processor is set."""

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
"""Of the text model: what decides how its keys and values are made and read."""


@torch.no_grad()
def model_fingerprint(model: Any) -> str:
    """Tell checkpoints apart: model type, dtype, and a SHA-256.

    The digest covers the text model's configuration as far as it concerns the cache, and of every
    parameter its shape and 64 values at fixed places (fewer if it is smaller). So another
    checkpoint, a fine-tuned one or one in other bits has another fingerprint; a change of single
    weights that are not among the samples goes unnoticed. Names of parameters and devices do not
    count: a checkpoint has one fingerprint with all versions of transformers.

    Each rank has a fingerprint of its own, for it has other heads.

    Args:
        model: a model of transformers that generates.
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
    whole = hashlib.sha256(about.encode() + b"".join(digests)).hexdigest()
    kind = f"{model.config.model_type} {str(model.dtype).removeprefix('torch.')}"
    ranks = Ranks.of(model)
    return f"{kind} {whole}" if ranks.count == 1 else f"{kind} {ranks} {whole}"


def attributes_digest(value: Any) -> str:
    """SHA-256 of an object by what it consists of, down to the content of its arrays.

    Attributes and items count by their names in any order, objects by their class too. What has
    neither attributes nor items counts as ``repr`` writes it.

    Args:
        value: objects, mappings, sequences, arrays and tensors of any depth, in no circle.
    """
    return hashlib.sha256(json.dumps(_described(value), sort_keys=True).encode()).hexdigest()


def _described(value: Any) -> Any:
    """What stands in JSON for a value."""
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
