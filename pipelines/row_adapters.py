"""Load LoRA adapters of peft that requests choose by name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from transformers import PreTrainedModel

from oscar_mm.errors import InputError, shown
from oscar_mm.fast_decode.row_adapters import AdaptedLinear, RowAdapters
from oscar_mm.models import ADAPTER_CONFIG, MAX_NAME, is_name
from oscar_mm.modules import computing_device, devices, modules_of
from oscar_mm.pipelines.adapters import MERGE, PEFT_ERRORS, one_line

MAX_ADAPTERS, MAX_RANK, MAX_RANKS = 32, 256, 1024
"""Maximum number of adapters, of the rank of each, and of all ranks together: every row of a step
is multiplied by the matrices of all adapters."""
_ALIGNMENT = 16
"""All ranks together are rounded up to a multiple, which matrix units need."""
_WEIGHTS = "adapter_model.safetensors"
_MAX_CONFIG_BYTES = 1 << 20
_MAX_TENSOR_NAME = 300
"""Maximum number of characters of a tensor's name in a message."""
_KNOWN = {
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "lora_dropout"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("base_model_name_or_path", "revision", "task_type", "peft_type", "peft_version"),
    *("auto_mapping", "inference_mode", "init_lora_weights", "runtime_config"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_core"),
    *("qalora_group_size", "ensure_weight_tying"),
}
"""Fields of ``LoraConfig`` that may have any value: they say which modules have which matrices, or
matter only in training."""
_INITS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that leave the base model's weights as they are."""


class _Source(NamedTuple):
    """An adapter to load.

    Attributes:
        key: its name within PEFT, which finds missing weights by this name as a substring; so no
            other name contains it.
        name: its name for requests.
        config: its ``LoraConfig``.
    """

    key: str
    name: str
    folder: Path
    config: Any = None

    def refuse(self, fault: str) -> NoReturn:
        """Raise an error about this adapter."""
        raise InputError(f"adapters: {shown(self.name)}: the adapter in {self.folder} {fault}")


def add_row_adapters(
    model: PreTrainedModel, part: PreTrainedModel, folders: Mapping[str, str | Path]
) -> None:
    """Load adapters that requests choose by name; requests that choose none use the model alone.

    If an adapter is refused, the model stays as it was.

    Args:
        model: the model that the adapters belong to, with all weights on one device.
        part: the part of it that generates text; ``RowAdapters.of`` this part has the result.
        folders: folder of each adapter, by name.

    Raises:
        InputError: if a name or a folder is invalid, there are too many adapters, or one does not
            fit the model.
    """
    if not isinstance(folders, Mapping):
        raise InputError(
            "adapters: must be a dict from name to folder, such as {'legal': './legal-lora'}, not "
            f"{shown(folders)}"
        )
    if not folders:
        return
    if len(folders) > MAX_ADAPTERS:
        raise InputError(
            f"adapters: {len(folders)} are more than the limit of {MAX_ADAPTERS}: load fewer"
        )
    if any(hasattr(module, "adapter_layer_names") for module in modules_of(model)):
        raise InputError(
            "adapters: the model has an adapter for all requests already: load the base model, and "
            "name that adapter here too"
        )
    if len(places := devices(part)) > 1 or places == {torch.device("meta")}:
        raise InputError(
            "adapters: all weights must be on one device: pass device instead of device_map"
        )
    sources = [_source(f"row_adapter_{at:02}", *item) for at, item in enumerate(folders.items())]
    if (ranks := sum(max(_ranks(source)) for source in sources)) > MAX_RANKS:
        raise InputError(
            f"adapters: their ranks add up to {ranks:,}, more than {MAX_RANKS:,}: load fewer, or "
            "adapters of smaller rank"
        )
    layers = _loaded_layers(model, sources)
    for path, layer in layers.items():
        for source in sources:
            _check_layer(source, path, layer, part)
    _install(model, part, sources, layers)


def _source(key: str, name: Any, folder: Any) -> _Source:
    """Check a name, a folder and its configuration, without reading weights."""
    if not is_name(name):
        raise InputError(
            f"adapters: {shown(name)} is not a name: it must have 1 to {MAX_NAME} printable "
            "characters"
        )
    if not isinstance(folder, str | Path) or not str(folder).strip():
        raise InputError(f"adapters: {shown(name)} needs the path of a folder, not {shown(folder)}")
    source = _Source(key, name, Path(folder))
    for file in (ADAPTER_CONFIG, _WEIGHTS):
        if not (source.folder / file).is_file():
            source.refuse(f"has no {file}: pass a folder that save_pretrained of peft has written")
    if (source.folder / ADAPTER_CONFIG).stat().st_size > _MAX_CONFIG_BYTES:
        source.refuse(
            f"has an {ADAPTER_CONFIG} of more than {_MAX_CONFIG_BYTES:,} bytes, unlike any of peft"
        )
    try:
        from peft import LoraConfig, PeftConfig

        config = PeftConfig.from_pretrained(str(source.folder))
    except ImportError:
        raise InputError("adapters: they need peft: pip install peft") from None
    except PEFT_ERRORS as error:
        source.refuse(f"has an {ADAPTER_CONFIG} that cannot be read ({one_line(error)})")
    if not isinstance(config, LoraConfig):
        source.refuse(f"is not LoRA, which alone can be chosen per request: {MERGE}")
    _check_config(source._replace(config=config), LoraConfig())
    config.inference_mode = True
    return source._replace(config=config)


def _check_config(source: _Source, usual: Any) -> None:
    """Refuse all but low-rank products beside linear modules, of bounded ranks."""
    config = source.config
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in _KNOWN and value and value != getattr(usual, field.name):
            source.refuse(f"has {field.name}={shown(value)}, which requests cannot choose: {MERGE}")
    if config.init_lora_weights not in _INITS:
        source.refuse(
            f"has init_lora_weights={shown(config.init_lora_weights)}, for other weights of the "
            "base model: save it with path_initial_model_for_weight_conversion"
        )
    if not isinstance(config.rank_pattern or {}, Mapping):
        source.refuse(
            f"has rank_pattern={shown(config.rank_pattern)}, which is not a dict of ranks"
        )
    for rank in _ranks(source):
        if type(rank) is not int or not 1 <= rank <= MAX_RANK:
            source.refuse(f"has rank {shown(rank)}: ranks must be from 1 to {MAX_RANK}")


def _ranks(source: _Source) -> list[int]:
    return [source.config.r, *(source.config.rank_pattern or {}).values()]


def _loaded_layers(model: PreTrainedModel, sources: Sequence[_Source]) -> dict[str, Any]:
    """Load adapters through PEFT, and take its layers out of the model again, by path."""
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted: Any = None
    try:
        for source in sources:
            try:
                if adapted is None:
                    adapted = PeftModel(model, source.config, adapter_name=source.key)
                else:
                    adapted.add_adapter(source.key, source.config)
                _load_weights(source, adapted)
            except InputError:
                raise
            except PEFT_ERRORS as error:
                source.refuse(
                    f"cannot be loaded into this model ({one_line(error)}): pass one saved for it"
                )
        named = list(model.named_modules())
        return {path: layer for path, layer in named if isinstance(layer, BaseTunerLayer)}
    finally:
        if adapted is not None:
            adapted.unload()
            vars(model).pop("peft_config", None)


def _load_weights(source: _Source, adapted: Any) -> None:
    """Read an adapter's file, unless it has more weights than the adapter."""
    named = adapted.named_parameters()
    count = sum(weight.numel() for name, weight in named if f".{source.key}.weight" in name)
    if (source.folder / _WEIGHTS).stat().st_size > 8 * count + _MAX_CONFIG_BYTES:
        source.refuse(f"has more weights in {_WEIGHTS} than the {count:,} that its ranks need")
    report = adapted.load_adapter(str(source.folder), source.key)
    for fault in ("missing", "unexpected"):
        if names := getattr(report, f"{fault}_keys"):
            source.refuse(
                f"has {len(names)} {fault} weights, such as {shown(names[0], _MAX_TENSOR_NAME)}: "
                "it belongs to another model: pass an adapter of this one"
            )


def _check_layer(source: _Source, path: str, layer: Any, part: PreTrainedModel) -> None:
    """Refuse an adapter of anything but a linear module that takes a row for each token."""
    key, base = source.key, layer.get_base_layer()
    kinds = {kind: getattr(layer, kind) for kind in layer.adapter_layer_names}
    own = {kind: matrices[key] for kind, matrices in kinds.items() if key in matrices}
    if not own:
        return
    inner = set(modules_of(part)) - {part.get_output_embeddings()}
    plain = own.keys() == {"lora_A", "lora_B"} and key not in layer.lora_variant
    plain = plain and all(type(matrix) is torch.nn.Linear for matrix in own.values())
    if base not in inner or ".experts." in path or not plain:
        source.refuse(
            f"adapts {path} ({type(base).__name__}), but requests can choose adapters of linear "
            f"modules in the layers of the text model and its towers only: {MERGE}"
        )


def _install(
    model: PreTrainedModel,
    part: Any,
    sources: Sequence[_Source],
    layers: Mapping[str, Any],
) -> None:
    """Put the matrices of all adapters around the modules of a model."""
    ends = list(accumulate(_largest_rank(source, layers.values()) for source in sources))
    starts, ranks = [0, *ends][:-1], -(-ends[-1] // _ALIGNMENT) * _ALIGNMENT
    dtype, hashes = part.get_input_embeddings().weight.dtype, [hashlib.sha256() for _ in sources]
    made = dict[str, AdaptedLinear]()
    for path, layer in layers.items():
        made[path] = module = _around(layer, ranks, dtype)
        for source, start, digest in zip(sources, starts, hashes, strict=True):
            if source.key in layer.lora_A:
                _fill(module, path, layer, source, start, digest)
    for path, module in made.items():
        model.set_submodule(path, module)
    idle = torch.ones(len(sources) + 1, ranks, dtype=torch.bool)
    for place, (start, end) in enumerate(zip(starts, ends, strict=True), 1):
        idle[place, start:end] = False
    digests = {x.name: done.hexdigest() for x, done in zip(sources, hashes, strict=True)}
    RowAdapters(digests, idle.to(part.get_input_embeddings().weight.device)).attach(part)


def _largest_rank(source: _Source, layers: Iterable[Any]) -> int:
    of = (layer.lora_A[source.key] for layer in layers if source.key in layer.lora_A)
    return max(down.out_features for down in of)


def _around(layer: Any, ranks: int, dtype: torch.dtype) -> AdaptedLinear:
    """Return the base module of a layer of PEFT with empty stacks around it."""
    base = layer.get_base_layer()
    down = torch.zeros(ranks, layer.in_features, dtype=dtype, device=computing_device(base))
    return AdaptedLinear(base, down, down.new_zeros(layer.out_features, ranks))


def _fill(
    module: AdaptedLinear, path: str, layer: Any, source: _Source, start: int, digest: Any
) -> None:
    """Copy the matrices of an adapter into its ranks of the stacks, and hash them.

    Args:
        module: module with the stacked matrices of all adapters.
        path: name of the module in the model, for messages.
        layer: peft's layer, which has the adapter's matrices.
        source: the adapter.
        start: first of its ranks in the stacks.
        digest: hash of the adapter so far.

    Raises:
        InputError: if a weight is not finite in the model's dtype; the message names the tensor.
    """
    down, up = (kind[source.key].weight.detach().float() for kind in (layer.lora_A, layer.lora_B))
    up = up * layer.scaling[source.key]
    own = slice(start, start + len(down))
    module.down[own], module.up[:, own] = down, up
    for kind, matrix in (("lora_A", module.down[own]), ("lora_B", module.up[:, own])):
        if not matrix.isfinite().all():
            source.refuse(
                f"has weights that are infinite or NaN in the model's dtype, in {path}.{kind}: "
                "pass an intact adapter"
            )
    for matrix in (down, up):
        digest.update(repr(tuple(matrix.shape)).encode())
        digest.update(matrix.cpu().contiguous().numpy().tobytes())
