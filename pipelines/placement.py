"""Placement: where weights go: to one device, by layers to several, or in parts to processes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import distributed
from transformers import PreTrainedModel, Qwen3MoeConfig
from transformers.distributed.configuration_utils import DistributedConfig

from oscar_mm.errors import InputError

_WHOLE = "replicated_with_grad_allreduce"
"""The style of transformers that leaves a module to every rank as it is, but for training."""
_LAYERS = {
    name: style
    for name, style in (Qwen3MoeConfig.base_model_tp_plan or {}).items()
    if style != _WHOLE
}
"""Styles of a decoder's modules, which have the same names in all our families. What transformers
says of these families itself leaves out Qwen3-VL's layers and, on 5.17, the experts' sum, and has
rules of the talker that 5.23 cannot carry out."""


class Placement:
    """Where the weights of a checkpoint go; one of the arguments, or none.

    Args:
        device: "cuda", "cpu", ...; by default a GPU if there is one.
        device_map: of transformers: "auto", "balanced", ..., or a device by module. Layers go to
            different devices, and with each the pages of its keys and values.
        tp_plan: "auto", or a style of transformers by module. Each process that torchrun started
            gets a part of every layer, and stores the keys and values of its own heads.

    Raises:
        InputError: more than one argument, a device that cannot be used, or tp_plan without
            torchrun.
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        device_map: str | Mapping[str, Any] | None = None,
        tp_plan: str | Mapping[str, str] | None = None,
    ) -> None:
        arguments = {"device": device, "device_map": device_map, "tp_plan": tp_plan}
        given = [name for name, value in arguments.items() if value is not None]
        if len(given) > 1:
            raise InputError(f"{' and '.join(given)} contradict each other: give one of them")
        if tp_plan is not None and tp_plan != "auto" and not isinstance(tp_plan, Mapping):
            raise InputError(f"tp_plan={tp_plan!r}: must be 'auto' or a style for each module")
        self.given = given
        self.device_map = device_map
        self.tp_plan = None if tp_plan is None or _processes() == 1 else tp_plan
        self.target: torch.device | None = None
        if device_map is None and self.tp_plan is None:
            self.target = device_of(device)

    @property
    def on_cpu(self) -> bool:
        """Whether the weights are on a CPU."""
        if self.target is None:
            return not torch.cuda.is_available()
        return self.target.type == "cpu"

    def arguments(self, auto_class: Any, config: Any) -> dict[str, Any]:
        """For ``from_pretrained``, after which a model goes to ``target`` if there is one.

        Raises:
            InputError: the heads cannot be divided among the processes.
        """
        if self.device_map is not None:
            return {"device_map": self.device_map}
        if self.tp_plan is None:
            return {}
        count = _processes()
        _check_heads(config, count)
        plan = self.tp_plan
        if isinstance(plan, str):
            plan = tensor_plan(on_meta(auto_class, config), count)
        return {"distributed_config": DistributedConfig(tp_size=count, tp_plan=dict(plan))}


def tensor_plan(model: PreTrainedModel, count: int) -> dict[str, str]:
    """Styles of transformers for what is divided: heads, MLPs, experts and the output layer.

    Args:
        model: may be without weights.
        count: number of processes.
    """
    writer: Any = getattr(model, "thinker", model)
    names = {id(module): name for name, module in model.named_modules()}
    decoder, head = (
        names[id(part)] for part in (writer.get_decoder(), writer.get_output_embeddings())
    )
    layers = dict(_LAYERS)
    if model.config.model_type == "qwen3_vl_moe":
        # Its checkpoints have these transposed, which transformers up to 5.23 cuts wrongly.
        layers |= {name: _WHOLE for name in layers if ".experts" in name}
    # Newer versions add the model's own rules to these.
    plan = dict.fromkeys(model.tp_plan, _WHOLE)
    plan |= {f"{decoder}.{name}": style for name, style in layers.items()}
    if writer.get_output_embeddings().out_features % count == 0:
        plan[head] = "colwise_gather_output"
    parts = chain(model.named_modules(), model.named_parameters())
    there = {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name, _ in parts}
    return {name: style for name, style in plan.items() if name in there}


def on_meta(auto_class: Any, config: Any) -> PreTrainedModel:
    """A model that has shapes but no weights."""
    make = getattr(auto_class, "from_config", None) or auto_class._from_config
    with torch.device("meta"):
        return make(config)


def device_of(device: str | torch.device | None) -> torch.device:
    """The device of a name, or by default a GPU if there is one.

    Raises:
        InputError: it cannot be used.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"device {device!r} cannot be used: {reason[0]}") from error
    return chosen


def _processes() -> int:
    """How many processes torchrun started."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    if "WORLD_SIZE" not in os.environ:
        raise InputError(
            "tp_plan needs a process for each GPU: start the program with "
            "torchrun --nproc-per-node 2 PROGRAM (or 4, 8, ...)"
        )
    here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if gpus and here > gpus:
        raise InputError(f"tp_plan: {here} processes were started, but there are {gpus} GPUs")
    return int(os.environ["WORLD_SIZE"])


def _check_heads(config: Any, count: int) -> None:
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if heads % count:
        possible = " or ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise InputError(
            f"tp_plan: the model has {heads} KV heads in a layer, which cannot be divided among "
            f"{count} processes: start {possible}"
        )
