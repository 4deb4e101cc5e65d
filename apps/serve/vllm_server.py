"""vLLM's OpenAI server with this package's KV cache: its command line and its start."""

import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

from oscar_mm.errors import InputError
from oscar_mm.extras import require
from oscar_mm.models import source_of
from oscar_mm.policy import PAGE_TOKENS
from oscar_mm.vllm_plugin import additional_config, servable

_MODULE = "vllm.entrypoints.openai.api_server"
_KEY_VARIABLE = "VLLM_API_KEY"
_REDIRECTS = "VLLM_MEDIA_URL_ALLOW_REDIRECTS"
_DOMAINS = "--allowed-media-domains"
_NO_DOMAIN = "remote-media-are-off.invalid"
"""A host name that cannot exist, because .invalid is reserved (RFC 2606)."""
_BACKEND = "CUSTOM"
_OF_WINDOWS = {"backend_per_kind": {"sliding_window": "FLASH_ATTN"}}
_TAKES_KINDS = (0, 33)
"""First version of vLLM in which kinds of layers can have different attention."""
_DRAFTS = "--speculative-config"
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
    "lora": lambda adapters: ["--enable-lora", "--lora-modules", *adapters],
    "served_model_name": lambda names: ["--served-model-name", *names],
    "allow_origin": lambda origins: ["--allowed-origins", json.dumps(origins)],
    "log_level": lambda level: ["--uvicorn-log-level", level],
}
"""For each option of ``oscar-mm serve``, a function that converts its value to vLLM's arguments."""
_REFUSED = {
    "max_request": "vLLM does not limit the size of a request",
    "waiting": "vLLM does not limit its queue",
    "queue_timeout": "vLLM does not limit its queue",
    "trusted_proxy": "vLLM does not tell clients apart",
    "realtime": "vLLM does not limit realtime sessions",
    "conversations": "vLLM caches all prompt prefixes that fit into its KV memory",
    "prefill_chunk": "vLLM chunks prompts itself: use -- --max-num-batched-tokens N",
    "ignore_tools": "vLLM refuses tools unless -- --enable-auto-tool-choice is set",
    "weights": "use -- --quantization fp8, or a checkpoint that is quantized",
    "drafts": f'use -- {_DRAFTS} JSON, such as {{"method": "mtp", "num_speculative_tokens": 1}}',
    "device": "set CUDA_VISIBLE_DEVICES to choose vLLM's GPUs",
    "device_map": "use -- --tensor-parallel-size N, which spreads a model over N GPUs",
}
"""Options without an equivalent in vLLM, each with a reason or an alternative."""


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
    """Convert the arguments of ``oscar-mm serve`` to arguments of vLLM's server.

    Args:
        model: name of a bundled model, path of a model folder, or hub id.
        policy: preset for vLLM's KV cache, with or without changes.
        host, port: address to listen on.
        options: other options that the user has set, by name, with ``kv_budget`` in bytes; vLLM's
            defaults apply to options that are not set.
        passed: further arguments for vLLM; they come last, so they override the others. Drafts get
            our attention too, unless these arguments name another.
        has_key: whether clients must send an API key; without a key, web pages cannot use the
            server unless ``allow_origin`` is set.

    Raises:
        InputError: if vLLM cannot store the policy, or has no equivalent of an option.
    """
    servable(policy)
    source = source_of(model)
    arguments = ["--model", source]
    if source != model and "served_model_name" not in options:
        arguments += ["--served-model-name", model]
    arguments += ["--host", host, "--port", str(port)]
    arguments += ["--attention-backend", _BACKEND, "--block-size", str(PAGE_TOKENS)]
    arguments += _window_arguments(passed)
    arguments += ["--additional-config", json.dumps(additional_config(policy))]
    domains = options.get("allowed_media_domains") or []
    if below := [name for name in domains if name.startswith("*.")]:
        raise InputError(
            f"--allowed-media-domains {below[0]} with --engine vllm: vLLM matches only complete "
            "host names; list each host"
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
    return [*arguments, *_with_draft_attention(passed)]


def _window_arguments(passed: Sequence[str]) -> list[str]:
    """Return arguments that leave layers with sliding windows to vLLM, which our pages lack.

    There are none if the user chooses attention, or if all layers of this vLLM have the same.
    """
    if _option_names(passed) & {"--attention-config", "-ac"} or _vllm_version() < _TAKES_KINDS:
        return []
    return ["--attention-config", json.dumps(_OF_WINDOWS)]


def _with_draft_attention(passed: Sequence[str]) -> list[str]:
    """Return vLLM's arguments with our attention for drafts, if they ask for drafts.

    vLLM's own attention would have larger blocks, which make those of the model larger too.
    """
    found = list(passed)
    for place, argument in enumerate(found):
        name, equals, value = argument.partition("=")
        if _hyphenated(name) not in (_DRAFTS, "-sc"):
            continue
        if equals:
            found[place] = f"{name}={_with_backend(value)}"
        elif place + 1 < len(found):
            found[place + 1] = _with_backend(found[place + 1])
        return found
    if _DRAFTS in _option_names(found):  # as in --speculative-config.method
        # vLLM makes one object of such arguments, and takes the last of two equal ones.
        return [f"{_DRAFTS}.attention_backend", _BACKEND, *found]
    if _option_names(found) & {"--spec-method", "--spec-model"}:
        return [_DRAFTS, _with_backend("{}"), *found]
    return found


def _with_backend(drafts: str) -> str:
    """Return a JSON object about drafts with our attention, unless it names another."""
    try:
        given = json.loads(drafts)
    except ValueError:
        return drafts  # vLLM says what is wrong.
    if not isinstance(given, dict):
        return drafts
    return json.dumps({"attention_backend": _BACKEND} | given)


def _option_names(passed: Sequence[str]) -> set[str]:
    return {_hyphenated(re.split("[=.]", argument)[0]) for argument in passed}


def _hyphenated(option: str) -> str:
    """Return the name of an option as vLLM reads it, which takes underscores for hyphens."""
    return option.replace("_", "-") if option.startswith("--") else option


def _vllm_version() -> tuple[int, ...]:
    """Return the first two numbers of the version of vLLM; (0, 0) if it is not installed."""
    try:
        return tuple(int(number) for number in re.findall(r"\d+", version("vllm"))[:2])
    except PackageNotFoundError:
        return 0, 0


def _prefix_arguments(size: str | None) -> list[str]:
    if size is None:
        return []
    if size not in ("0", "off"):
        raise InputError(
            f"--prefix-cache {size} with --engine vllm: vLLM caches prefixes in all unused KV "
            'memory; the only possible value is "off"'
        )
    return ["--no-enable-prefix-caching"]


def check_installed() -> None:
    """Check that vLLM is installed.

    Raises:
        InputError: if vLLM is not installed; the message contains the command that installs it.
    """
    require("--engine vllm", "vllm", "vllm")


def vllm_command(arguments: Sequence[str], api_key: str | None) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment for vLLM's server.

    Args:
        arguments: see ``vllm_arguments``.
        api_key: key that clients must send, or None. The key is passed in the environment, because
            command lines are visible to all users of a machine.
    """
    environment = os.environ | ({} if api_key is None else {_KEY_VARIABLE: api_key})
    if _DOMAINS in arguments:
        environment |= {_REDIRECTS: "0"}  # A redirect could lead to any host.
    return [sys.executable, "-m", _MODULE, *arguments], environment


def become_vllm(arguments: Sequence[str], api_key: str | None) -> NoReturn:
    """Replace this process with vLLM's server, which then receives signals and sets the exit code.

    Args:
        arguments, api_key: see ``vllm_command``.
    """
    command, environment = vllm_command(arguments, api_key)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, environment)
