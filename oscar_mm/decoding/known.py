"""Known decoders: which models ``TokenLayers`` may run in the place of their own modules.

That leaves out what transformers or a user has put around a module, so everything that is around
one has to be known: hooks of ours, of accelerate where it only moves tensors from one device to the
next, and of transformers where it divides a layer among ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from oscar_mm.ranks import is_dtensor

KNOWN_LAYERS = (
    "LlamaDecoderLayer",
    "MistralDecoderLayer",
    "Qwen2DecoderLayer",
    "Qwen3VLTextDecoderLayer",
    "Qwen3VLMoeTextDecoderLayer",
    "Qwen3OmniMoeThinkerTextDecoderLayer",
)
"""Classes of transformers with this arithmetic."""
_HOMES = ("transformers.models.", "transformers.activations", "torch.nn.modules.")
"""Where the classes of such decoders come from. Whatever quantizes or adapts a model (GPTQ, AWQ,
bitsandbytes, transformers.integrations, PEFT, parametrizations) puts classes of its own in."""
_DIVIDED_BY = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 0),
    **dict.fromkeys(("o_proj", "down_proj"), 1),
}
"""Products that ranks divide, and the dimension: 0 for some outputs from all inputs, 1 for all
outputs from some inputs, to be added up."""


def is_known(model: Any) -> bool:
    """Whether the decoder is of a known kind, and nobody has changed how its modules run."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    layers = getattr(decoder, "layers", ())
    return (
        type(head) is nn.Linear
        and model.config.get_text_config(decoder=True).hidden_act == "silu"
        and sees_all(model)
        and all(type(layer).__name__ in KNOWN_LAYERS for layer in layers)
        and all(_is_plain(module) for module in (model, head, *decoder.modules()))
        and all(len(devices(layer)) == 1 and _is_divided_as_known(layer) for layer in layers)
    )


def sees_all(model: Any) -> bool:
    """Whether every token attends to all before it, not to a sliding window."""
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "sliding_window", None) is None


def devices(module: nn.Module) -> set[torch.device]:
    """Those of its weights and buffers."""
    return {tensor.device for tensor in (*module.parameters(), *module.buffers())}


def is_divided(module: nn.Module, dimension: int | None = None) -> bool:
    """Whether a rank has a part of a module's weights only.

    Args:
        dimension: by which; None for any.
    """
    # A DTensor's.
    placements = getattr(getattr(module, "weight", None), "placements", ())
    return any(one.is_shard(dimension) for one in placements)


def _is_divided_as_known(layer: Any) -> bool:
    """Whole, or with heads and what is between the MLP's products divided."""
    divided = {module for module in layer.modules() if is_divided(module)}
    for block in (layer.self_attn, layer.mlp):
        products = {one: name for name, one in block.named_children() if name in _DIVIDED_BY}
        as_known = {one for one, name in products.items() if is_divided(one, _DIVIDED_BY[name])}
        if as_known and as_known != products.keys():
            return False
        divided -= as_known
    return not divided


def _is_plain(module: nn.Module) -> bool:
    """No class or hooks of others, no forward of its own, no weights but floating-point tensors."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return (
        all(getattr(hook, "__module__", "").startswith("oscar_mm.") for hook in hooks)
        and type(module).__module__.startswith(_HOMES)
        and _runs_as_written(module)
        and all(x.is_floating_point() and x.itemsize > 1 for x in module.parameters(recurse=False))
        and (type(module) is nn.Linear or not isinstance(module, nn.Linear))
    )


def _runs_as_written(module: nn.Module) -> bool:
    """No forward but the class's, or that one with what accelerate or transformers puts around."""
    weights = [weight for weight in module._parameters.values() if weight is not None]
    forward = vars(module).get("forward")
    if forward is None:
        return all(type(weight) is nn.Parameter for weight in weights)
    if getattr(forward, "__module__", "") == "transformers.distributed.tensor_parallel":
        return all(type(weight) is nn.Parameter or is_dtensor(weight) for weight in weights)
    hook = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", (hook,))
    return getattr(module, "_old_forward", None) is not None and all(_only_moves(x) for x in hooks)


def _only_moves(hook: Any) -> bool:
    """Whether a hook brings inputs to the device where the weights stay."""
    kind = f"{type(hook).__module__}.{type(hook).__name__}"
    return kind == "accelerate.hooks.AlignDevicesHook" and not hook.offload
