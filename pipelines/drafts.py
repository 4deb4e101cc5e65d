"""Load a checkpoint's own draft module (MTP), which transformers leaves out."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils.hub import cached_file

from oscar_mm.errors import InputError
from oscar_mm.fast_decode.decoder import supports
from oscar_mm.fast_decode.drafts import Drafts
from oscar_mm.fast_decode.hybrid_layers import is_hybrid
from oscar_mm.modules import devices
from oscar_mm.tensor_parallel import TPGroup

_PREFIX = "mtp."
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_EXPERTS = "layers.0.mlp.experts."


def add_drafts(model: Any, source: str, options: Mapping[str, Any]) -> None:
    """Attach the checkpoint's draft module to a loaded model.

    Args:
        model: language model of a loaded checkpoint, on its devices.
        source: hub id or folder of the checkpoint.
        options: arguments of ``from_pretrained`` that say where files are.

    Raises:
        InputError: if the model cannot use drafts, or the checkpoint has no such module.
    """
    decoder = model.get_decoder()
    if not (is_hybrid(decoder.layers[0]) and supports(model)):
        raise InputError(
            f"drafts: {type(model).__name__} has no supported draft module; leave the argument out "
            "(Qwen3.5 has one)"
        )
    if TPGroup.of(model).count > 1 or len(places := devices(decoder)) > 1:
        raise InputError(
            "drafts: the model must be on one device; leave out device_map and tp_plan"
        )
    weights = _weights(source, options)
    if not weights:
        raise InputError(
            f"drafts: the checkpoint {source} has no weights {_PREFIX}*; leave the argument out"
        )
    with torch.device("meta"):
        drafts = Drafts(decoder)
    found = {name: tuple(weight.shape) for name, weight in weights.items()}
    expected = {name: tuple(weight.shape) for name, weight in drafts.state_dict().items()}
    if found != expected:
        name = min(dict(found.items() ^ expected.items()))
        fault = f"has shape {found.get(name)}, not {expected.get(name)}"
        raise InputError(
            f"drafts: {_PREFIX}{name} in {source} {fault if name in found else 'is missing'}; "
            "quantized weights of this module are not supported: leave the argument out"
        )
    [place] = places
    drafts = drafts.to_empty(device=place).to(decoder.norm.weight.dtype).eval()
    drafts.load_state_dict(weights)
    drafts.attach(decoder, model.get_output_embeddings())


def _weights(source: str, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the module's weights by their names in ``Drafts``; empty if there are none."""
    found = dict[str, torch.Tensor]()
    try:
        for file in _files(source, options):
            with safe_open(file, framework="pt") as opened:
                names = [name for name in list(opened.keys()) if name.startswith(_PREFIX)]
                found |= {name.removeprefix(_PREFIX): opened.get_tensor(name) for name in names}
        return _with_joined_experts(found)
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, SafetensorError) as error:
        raise InputError(f"drafts: the weights of {source} cannot be read: {error}") from error


def _files(source: str, options: Mapping[str, Any]) -> list[str]:
    """Return the paths of the files with the module's weights."""
    given: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False, **options}
    index = cached_file(source, _INDEX, **given)
    names = {_SINGLE}
    if index is not None:
        by_name = json.loads(Path(index).read_bytes())["weight_map"]
        names = {file for name, file in by_name.items() if name.startswith(_PREFIX)}
    found = (cached_file(source, name, **given) for name in sorted(names))
    return [file for file in found if file is not None]


def _with_joined_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Join the weights of all experts in one tensor for each product, as in transformers; takes
    those of single experts out of ``weights``.

    Raises:
        LookupError, RuntimeError: if weights of an expert are missing, or their shapes differ.
    """
    apart = defaultdict[str, dict[int, torch.Tensor]](dict)
    for name in [name for name in weights if name.startswith(_EXPERTS)]:
        number, _, product = name.removeprefix(_EXPERTS).partition(".")
        if number.isdecimal():
            apart[product][int(number)] = weights.pop(name)
    if not apart:
        return weights
    gate, up, down = (
        torch.stack([apart[product][number] for number in range(len(apart[product]))])
        for product in ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
    )
    joined = {"gate_up_proj": torch.cat([gate, up], 1), "down_proj": down}
    return weights | {f"{_EXPERTS}{name}": weight for name, weight in joined.items()}
