"""Shortcuts of loading for tests, which load the same tiny models a thousand times."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def shorten_loading() -> None:
    """Patch imported modules so that loading omits unread texts, empty work and repeated checks."""
    if transformers := sys.modules.get("transformers.configuration_utils"):
        # Loading turns configurations into text, for log lines that nobody reads and for errors of
        # type checks that another type passes. A tiny Qwen3-Omni takes almost twice as long.
        transformers.PreTrainedConfig.__repr__ = object.__repr__
    for name in ("kaiming_uniform_", "uniform_", "normal_", "ones_", "zeros_"):
        setattr(torch.nn.init, name, _skips_meta_tensors(getattr(torch.nn.init, name)))
    if loading := sys.modules.get("transformers.core_model_loading"):
        # Threads cost more than copies of tiny weights. Processes that tests start do have them.
        loading.is_env_variable_true = lambda _: True
    # Each client of HTTP reads all certificates of the system, but no test's server has one.
    for name in ("httpx", "httpx2"):
        if transports := sys.modules.get(f"{name}._transports.default"):
            transports.create_ssl_context = functools.cache(transports.create_ssl_context)
    if score_errors := sys.modules.get("oscar_mm.ops.score_errors"):
        score_errors._restored = _remembered(score_errors._restored)


def _skips_meta_tensors(fill: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``fill`` without effect on meta tensors, which models have until weights are loaded.

    PyTorch fills tensors without memory by slow Python functions.
    """

    @functools.wraps(fill)
    def filled(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        return tensor if tensor.is_meta else fill(tensor, *args, **options)

    return filled


def _remembered(restore: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Return ``restore`` with a memory of its results, which are equal for equal arguments.

    The check of weights packs and unpacks keys of each layer, which takes almost half the time of
    loading.
    """
    found = dict[Any, Tensor | None]()

    def restored(keys: Tensor, policy: Any, sigma: Tensor | None) -> Tensor | None:
        key = (
            policy,
            *(None if x is None else (x.shape, x.device, _bytes(x)) for x in (keys, sigma)),
        )
        if key not in found:
            found[key] = restore(keys, policy, sigma)
        return found[key]

    return restored


def _bytes(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy(force=True).tobytes()
