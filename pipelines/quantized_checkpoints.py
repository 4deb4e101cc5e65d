"""Load checkpoints with quantized weights, in the formats of ``checkpoint_formats``.

transformers loads such checkpoints with packages and kernels of others, many only on a GPU. Here it
reads the tensors as they are: a quantizer of our own replaces each quantized ``nn.Linear`` by a
module that has the tensors of the checkpoint, and after loading each of these by a
``QuantizedLinear``; on a CPU, FP8 weights are dequantized. Most such checkpoints have three
matrices for each expert, where transformers' modules stack those of all experts; some checkpoints
stack them too. After loading, the experts of a layer become ``QuantizedExperts``.

The checkpoint's tensors say which modules are quantized, and not the patterns of its configuration,
since those match names that another version of transformers gave to the modules.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers.auto import (
    AutoHfQuantizer,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from oscar_mm.errors import shown
from oscar_mm.pipelines.stored_modules import (
    CODES,
    OFFLOADED,
    STACKED,
    StoredExperts,
    StoredLinear,
    StoredStack,
    stacked_format,
)
from oscar_mm.weights.checkpoint_formats import (
    CheckpointFormat,
    Tensors,
    formats_of,
)

_METHOD = "oscar_mm"
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""Dtypes in the headers of safetensors files."""
_EXPERT = re.compile(r"(.+\.experts)\.(\d{1,5})\.(gate_proj|up_proj|down_proj)")
"""Name of an expert's matrix: module of all experts, number of the expert, name of the matrix."""
_OF_EXPERTS = ("gate_up_proj", "0.gate_proj.weight")
"""Names of a tensor in a module of experts of a checkpoint: stacked, or of the first expert."""
_SCALES = (".weight_scale_inv", ".weight_scale", "_proj_scale_inv")
"""Ends of names of scales that belong to quantized weights."""
_PLAIN_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class StoredWeights(QuantizationConfigMixin):
    """Selects the quantizer of this module in ``from_pretrained``.

    Attributes:
        fields: ``quantization_config`` of the checkpoint's configuration.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.quant_method: Any = _METHOD
        self.fields = fields


register_quantization_config(_METHOD)(StoredWeights)


def quantization_of(config: Any) -> Any:
    """Return the ``quantization_config`` of a model's configuration; None if it has none."""
    parts = config, config.get_text_config(decoder=True)
    return next((x for one in parts if (x := getattr(one, "quantization_config", None))), None)


def checked_formats(fields: Any) -> list[CheckpointFormat] | None:
    """Return the formats of a checkpoint's matrices, and check that its method is supported.

    Args:
        fields: ``quantization_config`` of the checkpoint's configuration.

    Returns:
        None if transformers has the method, and we do not.

    Raises:
        ValueError: if the method, or this kind of it, is not supported; the message names the
            field.
    """
    formats = formats_of(fields)
    method, names = fields.get("quant_method"), ("quant_method", "load_in_8bit", "load_in_4bit")
    if not isinstance(method, str | None):
        raise ValueError(f"quantization_config.quant_method is {shown(method)}, must be text")
    if not any(fields.get(name) for name in names):
        raise ValueError("quantization_config.quant_method is missing: download config.json again")
    known = method != _METHOD and AutoHfQuantizer.supports_quant_method(fields)
    if formats is None and not known:
        raise ValueError(
            f"quantization_config.quant_method is {shown(method)}, which is "
            "not supported; use a checkpoint in 16-bit, FP8, AWQ, GPTQ or of compressed-tensors"
        )
    return formats


def quantized_arguments(config: Any, tp_plan: object) -> dict[str, Any] | None:
    """Return the arguments with which ``from_pretrained`` loads a checkpoint's quantized weights.

    Args:
        config: configuration of the checkpoint.
        tp_plan: see ``Placement``.

    Returns:
        None if the checkpoint's weights are not in one of our formats.

    Raises:
        ValueError: if they cannot be loaded; the message says which field is not supported.
    """
    fields = quantization_of(config)
    if fields is None or (formats := checked_formats(fields)) is None:
        return None
    if tp_plan is not None:
        raise ValueError(
            f"tp_plan: weights in {formats[0].title} cannot be divided among processes; pass "
            "device_map='auto', or use a checkpoint with 16-bit weights"
        )
    plain = copy.deepcopy(config)
    for part in (plain, plain.get_text_config(decoder=True)):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    # For transformers the checkpoint is not quantized, so it keeps the dtypes of our modules.
    return {"config": plain, "quantization_config": StoredWeights(fields)}


def check_complete(model: nn.Module, report: Mapping[str, Any], *, quantized: bool) -> None:
    """Check that a model has the weights of its checkpoint, and no random ones in their place.

    Args:
        model: the loaded model.
        report: what ``from_pretrained`` returns with ``output_loading_info``.
        quantized: whether the checkpoint says how its weights are quantized.

    Raises:
        ValueError: if tensors are missing or have another shape, or if there are scales of weights
            in a checkpoint that is not quantized; the message names a tensor.
    """
    for name, found, expected in sorted(report["mismatched_keys"]):
        raise ValueError(
            f"{name}: the shape is {list(found)}, must be {list(expected)}: download the "
            "checkpoint again"
        )
    for name in () if quantized else sorted(report["unexpected_keys"]):
        weight = name.removesuffix("_inv").removesuffix("_scale")
        if name.endswith(_SCALES) and weight in model.state_dict():
            raise ValueError(
                f"the checkpoint has {name}, but its config.json has no quantization_config: "
                "download config.json again"
            )
    if missing := report["missing_keys"]:
        more = f" and {len(missing) - 1} more tensors" if len(missing) > 1 else ""
        raise ValueError(f"the checkpoint lacks {min(missing)}{more}: download it again")


@register_quantizer(_METHOD)
class StoredWeightsQuantizer(HfQuantizer):
    """Replaces modules before and after transformers loads the weights."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._experts: list[str] = []
        """Names in the checkpoint of modules whose experts have matrices of their own."""

    @property
    def _fields(self) -> Mapping[str, Any]:
        config: Any = self.quantization_config
        return config.fields

    def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
        """Check where the weights are to be.

        Raises:
            ValueError: if some are to be offloaded to the disk, or from GPUs to the CPU.
        """
        places = set(map(str, device_map.values())) if isinstance(device_map, Mapping) else set()
        if "disk" in places or {"cpu"} < places:
            raise ValueError(f"device_map: {OFFLOADED}")

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None = None, **_: Any
    ) -> None:
        """See the module's docstring.

        Raises:
            ValueError: if the headers of the checkpoint's files do not fit the model.
        """
        formats = formats_of(self._fields) or []
        names = _Names(model)
        experts: dict[str, dict[tuple[int, str], Tensors]] = defaultdict(dict)
        for stem, tensors in _headers(checkpoint_files or ()).items():
            if (stacked := stacked_format(formats, tensors)) and (path := names.experts(stem)):
                module = model.get_submodule(path)
                model.set_submodule(path, StoredStack(stem, module, stacked, tensors))
            elif not any(one.marks & tensors.keys() for one in formats):
                names.check(stem, tensors)
            elif (found := _EXPERT.fullmatch(stem)) and names.experts(found[1]):
                experts[found[1]][int(found[2]), found[3]] = tensors
            else:
                _replace(model, names, formats, stem, tensors)
        for stem, stored in experts.items():
            path = names.experts(stem) or stem
            if isinstance(model.get_submodule(path), StoredStack):
                raise ValueError(f"{stem}: experts are both stacked and by themselves")
            self._experts.append(stem)
            module = model.get_submodule(path)
            model.set_submodule(path, StoredExperts(stem, module, formats, stored))

    def update_weight_conversions(self, weight_conversions: list[Any], *model: Any) -> list[Any]:
        """Return transformers' rules for renaming and converting tensors, after one of our own.

        Our rule gives the codes of each expert's matrix another name, since the rules of
        transformers would stack tensors named ``weight``.
        """
        found = super().update_weight_conversions(weight_conversions, *model)
        if not self._experts:
            return found
        stems = "|".join(map(re.escape, self._experts))
        pattern = rf"^((?:{stems})\.\d+\.(?:gate_proj|up_proj|down_proj))\.weight$"
        return [WeightRenaming(pattern, rf"\1.{CODES}"), *found]

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        """See the module's docstring.

        Raises:
            ValueError: if values are invalid, or weights are offloaded.
        """
        for kind in (StoredExperts, StoredStack, StoredLinear):
            for name in [name for name, one in model.named_modules() if isinstance(one, kind)]:
                # Nothing else holds the module, so its memory is free before the next is converted.
                module: Any = model.get_submodule(name)
                model.set_submodule(name, module.converted())
        model.config.quantization_config = self._fields

    def is_serializable(self) -> bool:
        """Return whether the modules can be saved in the format of the checkpoint."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Whether the modules can be trained."""
        return False


def _headers(files: Sequence[str]) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors of files, on the meta device, by module and name.

    Raises:
        ValueError: if a file or a dtype is of another kind.
    """
    found: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for file in files:
        if not str(file).endswith(".safetensors"):
            raise ValueError(f"{file}: quantized weights must be in safetensors files")
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118, it is no dict
                part = opened.get_slice(name)
                if (dtype := _DTYPES.get(part.get_dtype())) is None:
                    raise ValueError(f"{name}: the dtype {part.get_dtype()} is not supported")
                stem, _, last = name.rpartition(".")
                found[stem][last] = torch.empty(part.get_shape(), dtype=dtype, device="meta")
    return found


class _Names:
    """Names of a checkpoint's tensors in a model, which transformers may have renamed."""

    def __init__(self, model: PreTrainedModel) -> None:
        rules = get_model_conversion_mapping(model)
        self._renamings = [one for one in rules if isinstance(one, WeightRenaming)]
        self._converters = [one for one in rules if isinstance(one, WeightConverter)]
        self._prefix = model.base_model_prefix
        self._tied = set(model.all_tied_weights_keys)
        self._state = model.state_dict()
        self._experts: dict[str, str | None] = {}

    def module(self, stem: str) -> str | None:
        """Return the name of the module that a checkpoint calls ``stem``; None if there is none.

        Raises:
            ValueError: if the model stacks its weights with others, or shares them.
        """
        found, is_merged = self._renamed(f"{stem}.weight")
        module, is_expert, _ = stem.rpartition(".experts.")
        if (is_merged and found in self._state) or (
            is_expert and self.experts(f"{module}.experts") is not None
        ):
            raise ValueError(
                f"{stem} is quantized, but is no gate_proj, up_proj or down_proj of an expert of "
                "the model; use a checkpoint with 16-bit weights"
            )
        if found in self._tied:
            raise ValueError(f"{stem} is quantized, but the configuration ties it to embeddings")
        return found.removesuffix(".weight") if found in self._state else None

    def experts(self, stem: str) -> str | None:
        """Return the name of the model's module that stacks the weights of experts.

        Args:
            stem: name of the module in the checkpoint.

        Returns:
            None if the model has no such module.
        """
        if stem not in self._experts:
            renamed = (self._renamed(f"{stem}.{name}")[0] for name in _OF_EXPERTS)
            paths = [name.rpartition(".experts.")[0] + ".experts" for name in renamed]
            self._experts[stem] = next(filter(self._stacks_experts, paths), None)
        return self._experts[stem]

    def _stacks_experts(self, path: str) -> bool:
        return {f"{path}.{name}" for name in STACKED} <= self._state.keys()

    def check(self, stem: str, tensors: Tensors) -> None:
        """Check that tensors of a module that is not quantized have the dtypes and the shapes of
        the model.

        Raises:
            ValueError: if they do not.
        """
        for last, tensor in tensors.items():
            name = f"{stem}.{last}"
            found, is_merged = self._renamed(name)
            if (own := self._state.get(found)) is None:
                continue
            if own.is_floating_point() and tensor.dtype not in _PLAIN_DTYPES:
                raise ValueError(f"{name} has codes in {tensor.dtype}, but its scales are missing")
            if tensor.shape != own.shape and not is_merged:
                raise ValueError(
                    f"{name}: the shape is {list(tensor.shape)}, must be {list(own.shape)}"
                )

    def _renamed(self, name: str) -> tuple[str, bool]:
        """Return a tensor's name in the model, and whether it is merged with others."""
        found, pattern = rename_source_key(
            name, self._renamings, self._converters, self._prefix, self._state
        )
        return found, pattern is not None


def _replace(
    model: PreTrainedModel,
    names: _Names,
    formats: Sequence[CheckpointFormat],
    stem: str,
    tensors: Tensors,
) -> None:
    """Replace a module by one that has the tensors of a checkpoint.

    Raises:
        ValueError: if the tensors are not those of the module.
    """
    if (name := names.module(stem)) is None:
        return
    module = model.get_submodule(name)
    if type(module) is not nn.Linear:
        raise ValueError(
            f"{stem} is quantized, but only Linear is supported, and not {type(module).__name__}"
        )
    model.set_submodule(name, StoredLinear(stem, module, formats, tensors))
