"""vLLM's OpenAI server with pages of this package: its command line, and its start."""

import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from oscar_mm.errors import InputError
from oscar_mm.models import source_of
from oscar_mm.policy import PAGE_TOKENS
from oscar_mm.vllm_plugin import additional_config, servable

_MODULE = "vllm.entrypoints.openai.api_server"
_KEY_VARIABLE = "VLLM_API_KEY"
_REDIRECTS = "VLLM_MEDIA_URL_ALLOW_REDIRECTS"
_DOMAINS = "--allowed-media-domains"
_NO_DOMAIN = "remote-media-are-off.invalid"
"""A host name that cannot exist: .invalid is reserved (RFC 2606)."""
_ARGUMENTS: dict[str, Callable[[Any], list[str]]] = {
    "kv_budget": lambda size: ["--kv-cache-memory-bytes", str(size)],
    "max_context": lambda tokens: ["--max-model-len", str(tokens)],
    "max_new_tokens": lambda tokens: [
        "--override-generation-config",
        json.dumps({"max_new_tokens": tokens}),
    ],
    "running": lambda answers: ["--max-num-seqs", str(answers)],
    "grace": lambda seconds: ["--shutdown-timeout", str(math.ceil(seconds))],
    "dtype": lambda name: ["--dtype", name],
    "served_model_name": lambda names: ["--served-model-name", *names],
    "allow_origin": lambda origins: ["--allowed-origins", json.dumps(origins)],
    "log_level": lambda level: ["--uvicorn-log-level", level],
}
"""Functions from the value of an option of ``oscar-mm serve`` to vLLM's arguments."""
_REFUSED = {
    "max_request": "vLLM does not bound a request's bytes",
    "waiting": "vLLM does not bound its queue",
    "conversations": "vLLM caches as many prefixes of prompts as fit into its KV memory",
    "prefill_chunk": "vLLM chunks prompts itself: use -- --max-num-batched-tokens N",
    "device": "CUDA_VISIBLE_DEVICES chooses vLLM's GPUs",
    "device_map": "use -- --tensor-parallel-size N, which spreads a model over N GPUs",
}
"""Options without an equivalent in vLLM, and the reason or the alternative."""


def vllm_arguments(
    model: str,
    policy: str,
    host: str,
    port: int,
    options: Mapping[str, Any],
    passed: Sequence[str] = (),
    *,
    has_key: bool = False,
) -> list[str]:
    """Return the arguments of vLLM's server for those of ``oscar-mm serve``.

    Args:
        model: name of a bundled model, folder or hub id.
        policy: preset, with or without changes, whose pages vLLM stores.
        host, port: address to listen on.
        options: other options that the user has given, by name, with ``kv_budget`` in bytes; vLLM
            has its own defaults for those not given.
        passed: arguments for vLLM, which follow and so override the others.
        has_key: whether clients must send a key. Without a key, no web page may use the server.

    Raises:
        InputError: if vLLM cannot store the policy, or has no equivalent of an option.
    """
    servable(policy)
    source = source_of(model)
    arguments = ["--model", source]
    if source != model and "served_model_name" not in options:
        arguments += ["--served-model-name", model]
    arguments += ["--host", host, "--port", str(port)]
    arguments += ["--attention-backend", "CUSTOM", "--block-size", str(PAGE_TOKENS)]
    arguments += ["--additional-config", json.dumps(additional_config(policy))]
    domains = options.get("allowed_media_domains") or []
    if below := [name for name in domains if name.startswith("*.")]:
        raise InputError(
            f"--allowed-media-domains {below[0]} with --engine vllm: vLLM matches only whole "
            "names; list each host"
        )
    if domains or not options.get("allow_remote"):
        arguments += [_DOMAINS, *(domains or [_NO_DOMAIN])]
    if not has_key and "allow_origin" not in options:
        arguments += ["--allowed-origins", "[]"]
    for name, value in options.items():
        if name in _REFUSED:
            raise InputError(f"--{name.replace('_', '-')} with --engine vllm: {_REFUSED[name]}")
        if name in _ARGUMENTS:
            arguments += _ARGUMENTS[name](value)
    arguments += _prefix_arguments(options.get("prefix_cache"))
    return [*arguments, *passed]


def _prefix_arguments(size: str | None) -> list[str]:
    if size is None:
        return []
    if size not in ("0", "off"):
        raise InputError(
            f"--prefix-cache {size} with --engine vllm: vLLM stores prefixes in all KV memory that "
            'no answer uses; only "off" is possible'
        )
    return ["--no-enable-prefix-caching"]


def check_installed() -> None:
    """Check that vLLM is installed.

    Raises:
        InputError: if it is not; the message has the command that installs it.
    """
    if importlib.util.find_spec("vllm") is None:
        raise InputError("--engine vllm needs the package vllm: pip install '.[vllm]' in a clone")


def vllm_command(arguments: Sequence[str], api_key: str | None) -> tuple[list[str], dict[str, str]]:
    """Return the command of vLLM's server, and its environment.

    Args:
        arguments: see ``vllm_arguments``.
        api_key: key that clients must send, or None. It is passed in the environment, because all
            users of a machine see arguments.
    """
    environment = os.environ | ({} if api_key is None else {_KEY_VARIABLE: api_key})
    if _DOMAINS in arguments:
        environment |= {_REDIRECTS: "0"}  # A redirect could lead to any host.
    return [sys.executable, "-m", _MODULE, *arguments], environment


def become_vllm(arguments: Sequence[str], api_key: str | None) -> NoReturn:
    """Replace this process by vLLM's server, so that signals and the exit code are vLLM's.

    Args:
        arguments, api_key: see ``vllm_command``.
    """
    command, environment = vllm_command(arguments, api_key)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, environment)
