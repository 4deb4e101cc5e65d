"""`oscar-mm serve`: serve a model over HTTP."""

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from oscar_mm.apps import options, terminal
from oscar_mm.apps.options import KEY_VARIABLE, api_key
from oscar_mm.apps.serve.clients import read_proxies
from oscar_mm.apps.serve.origins import read_origins
from oscar_mm.apps.server_process import (
    bind,
    freeze_loaded,
    listen,
    short_thread_turns,
    sigterm_as_ctrl_c,
    url,
)
from oscar_mm.errors import InputError, shown
from oscar_mm.extras import require
from oscar_mm.models import MAX_NAME, is_name
from oscar_mm.policy import DEFAULT, KVPolicy
from oscar_mm.sizes import parse_bytes

_PREFIXES = "1GB"
"""Default size of the prefix cache if --kv-budget is not set."""
_PACKAGES = "fastapi", "prometheus_client", "python_multipart", "uvicorn", "webrtcvad", "wsproto"
_LEVELS = ("info", "warning", "error")
_RELEASE_S = 2.0
"""Maximum seconds to wait for the engine to finish its step after the server has stopped."""


@options.grouped
def serve(
    *,
    context: typer.Context,
    passed: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="VLLM_OPTIONS", help="Arguments after --, passed on to vLLM (--engine vllm)."
        ),
    ] = None,
    model: options.Model = None,
    engine: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="oscar, or vllm to start vLLM's server, with this package's pages, instead.",
        ),
    ] = "oscar",
    policy: options.Policy = DEFAULT,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on; 0.0.0.0 for all of them.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", help="Port to listen on.")] = 8000,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=f"File with the key that clients must send; default: ${KEY_VARIABLE}, or none.",
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Model name for clients; repeat for several. Default: --model.",
        ),
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FOLDER",
            help="LoRA adapter saved by peft; a request chooses it with NAME as its model. "
            "Repeat for several.",
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Origin of web pages that may use the server (CORS), such as "
            "http://localhost:3000; repeat for several.",
        ),
    ] = None,
    log_level: Annotated[
        str,
        typer.Option(
            metavar="LEVEL",
            help="info logs every request, warning only refused ones, error only server faults.",
        ),
    ] = "info",
    kv_budget: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help='Maximum KV memory of all conversations, such as "8GB".'),
    ] = None,
    prefix_cache: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help='Size of the prefix cache; "off" disables it. Default: a quarter of --kv-budget, '
            f"or {_PREFIXES}.",
        ),
    ] = None,
    max_context: options.MaxContext = None,
    prefill_chunk: options.PrefillChunk = None,
    max_new_tokens: options.AnswerLength = None,
    max_request: Annotated[
        str, typer.Option(metavar="SIZE", help="Maximum size of a request, including base64 media.")
    ] = "64MB",
    running: Annotated[
        int, typer.Option(metavar="N", help="Maximum number of running answers.")
    ] = 64,
    waiting: Annotated[
        int, typer.Option(metavar="N", help="Maximum number of waiting requests.")
    ] = 64,
    queue_timeout: Annotated[
        float,
        typer.Option(
            metavar="S", help="Seconds after which a waiting request is refused; 0 for no limit."
        ),
    ] = 60.0,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            help="Address or network of a proxy whose X-Forwarded-For header says who the client "
            "is; repeat for several.",
        ),
    ] = None,
    conversations: Annotated[
        int, typer.Option(metavar="N", help="Maximum number of stored conversations.")
    ] = 64,
    realtime: Annotated[
        int, typer.Option(metavar="N", help="Maximum number of realtime sessions; 0 for none.")
    ] = 16,
    grace: Annotated[
        float,
        typer.Option(
            metavar="S", help="Seconds to let running answers finish on SIGTERM or Ctrl-C."
        ),
    ] = 10.0,
    ignore_tools: Annotated[
        bool,
        typer.Option(
            "--ignore-tools",
            help="Answer without a request's tools if the chat template does not support tools "
            "and no call is required, instead of refusing the request.",
        ),
    ] = False,
    placement: options.PlacementOptions,
    allow_remote: options.AllowRemote = False,
    allowed_media_domains: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST",
            help="With --allow-remote: fetch media from this host only (*.HOST: from all hosts "
            "below it) and follow no redirects; repeat, or separate hosts with commas.",
        ),
    ] = None,
) -> None:
    """Serve OpenAI's and Anthropic's APIs: text, images, videos and audio; streaming.

    A conversation continues its cache. GET /metrics is for Prometheus.
    """
    KVPolicy.preset(policy)
    size = parse_bytes("--max-request", max_request)
    budget = None if kv_budget is None else parse_bytes("--kv-budget", kv_budget)
    prefixes = prefix_bytes(prefix_cache, budget)
    for name, value, minimum in (
        ("max-new-tokens", max_new_tokens, 1),
        ("running", running, 1),
        ("waiting", waiting, 0),
        ("conversations", conversations, 1),
        ("realtime", realtime, 0),
    ):
        if value is not None and value < minimum:
            raise InputError(f"--{name} {value}: must be at least {minimum}")
    if not 0 < port < 65536:
        raise InputError(f"--port {port}: must be from 1 to 65535")
    if not 0 <= grace <= 3600:
        raise InputError(f"--grace {grace:g}: must be seconds, from 0 to 3600")
    if not 0 <= queue_timeout <= 3600:
        raise InputError(f"--queue-timeout {queue_timeout:g}: must be seconds, from 0 to 3600")
    proxies = read_proxies(trusted_proxy or ())
    domains = media_domains(allowed_media_domains, allow_remote=allow_remote)
    _check_words(log_level, served_model_name or ())
    adapters = read_adapters(lora or ())
    key = api_key(api_key_file)
    origins = read_origins(allow_origin or (), has_key=key is not None)
    if engine not in ("oscar", "vllm"):
        raise InputError(f"--engine {engine}: must be oscar or vllm")
    if engine == "vllm":
        given = {name: value for name, value in context.params.items() if _is_given(context, name)}
        if budget is not None:
            given["kv_budget"] = budget
        given["allowed_media_domains"] = domains
        if origins:
            given["allow_origin"] = list(origins)
        _serve_with_vllm(model, policy, host, port, given, passed or (), key)
    if passed:
        raise InputError(f"{passed[0]!r} is unexpected: only --engine vllm accepts such arguments")
    require("serve", "serve", *_PACKAGES)
    sockets = bind(host, port)
    model = options.model_or_bundled(model, supports_audio=True)
    name, *others = dict.fromkeys(served_model_name or [model])
    if both := adapters.keys() & {name, *others}:
        raise InputError(
            f"--lora {min(both)}: the model has this name already; choose another, or set "
            "--served-model-name"
        )
    terminal.quiet_transformers()
    from oscar_mm.apps.serve.application_server import ApplicationServer
    from oscar_mm.apps.serve.server import Server, create_app  # imports torch
    from oscar_mm.apps.serve.service import ServerLimits
    from oscar_mm.chat.warm_up import answer_in_advance
    from oscar_mm.engine.warm_up import warm_up
    from oscar_mm.media.source import AllowedHosts
    from oscar_mm.pipelines import pipeline_for

    pipe = pipeline_for(model)(
        model,
        policy=policy,
        **asdict(placement),
        max_context=max_context,
        prefill_chunk=prefill_chunk or "auto",
        allow_remote=allow_remote,
        adapters=adapters,
        kv_budget=budget,
        prefix_cache=prefixes,
    )
    _warn_of_no_key(host, key)
    limits = ServerLimits(
        api_key=key,
        max_request_bytes=size,
        max_new_tokens=max_new_tokens,
        running=running,
        waiting=waiting,
        queue_s=queue_timeout or None,
        trusted_proxies=proxies,
        conversations=conversations,
        realtime=realtime,
        grace_s=grace,
        media_hosts=AllowedHosts(domains) if domains else None,
        ignore_tools=ignore_tools,
    )
    app = create_app(pipe, name, limits, host, other_names=others, origins=origins)
    # On Windows, a process cannot inherit sockets by their file descriptors.
    server = ApplicationServer(app) if os.name == "posix" else Server(app)
    _log_requests(log_level)
    try:
        warm_up(pipe.engine, running)
        if pipe.family.talker is not None:  # Text needs no more than the warm-up above.
            answer_in_advance(pipe)
        freeze_loaded()
        listen(sockets)
        print(f"{name} at {url(host, port)}/v1", file=sys.stderr)
        # uvicorn raises the signal again after stopping.
        with short_thread_turns(), sigterm_as_ctrl_c(), suppress(KeyboardInterrupt):
            server.run(sockets)
    finally:
        if pipe.budget is not None:
            pipe.budget.close()
    try:
        pipe.engine.call(lambda: None, timeout=_RELEASE_S)
    except TimeoutError:
        # At exit, the engine thread must not be running a long prompt.
        sys.stderr.flush()
        os._exit(server.has_failed)
    if server.has_failed:
        print(
            "oscar-mm: error: the process that held the connections ended or did not start; start "
            "the server again",
            file=sys.stderr,
        )
        raise typer.Exit(1)


def _check_words(log_level: str, names: Sequence[str]) -> None:
    if log_level not in _LEVELS:
        raise InputError(f"--log-level {log_level}: must be {', '.join(_LEVELS[:-1])} or error")
    for name in names:
        if not is_name(name):
            raise InputError(
                f"--served-model-name {name[:MAX_NAME]!r}: must be 1 to {MAX_NAME} printable "
                "characters"
            )


def read_adapters(given: Sequence[str]) -> dict[str, str]:
    """Return the folder of each ``--lora`` adapter, by name.

    Raises:
        InputError: if an argument is not NAME=FOLDER, or two have the same name.
    """
    adapters = dict[str, str]()
    for text in given:
        name, equals, folder = text.partition("=")
        if not (equals and folder and is_name(name)):
            raise InputError(f"--lora {shown(text)}: must be NAME=FOLDER, such as legal=./legal")
        if name in adapters:
            raise InputError(
                f"--lora {shown(text)}: another --lora has this name; choose a different one"
            )
        adapters[name] = folder
    return adapters


def _log_requests(level: str) -> None:
    """Write the access log and the package's own log to stderr, from this level upward."""
    from oscar_mm.apps.serve.access_log import LOGGER

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    LOGGER.addHandler(handler)
    LOGGER.setLevel(level.upper())
    logging.getLogger("oscar_mm").setLevel(level.upper())
    LOGGER.propagate = False


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether the user has set an option, even to its default value."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _serve_with_vllm(
    model: str | None,
    policy: str,
    host: str,
    port: int,
    given: Mapping[str, Any],
    passed: Sequence[str],
    key: str | None,
) -> NoReturn:
    """Replace this process with vLLM's server; see ``vllm_arguments``."""
    from oscar_mm.apps.serve.vllm_server import become_vllm, check_installed, vllm_arguments

    if passed and not passed[0].startswith("-"):
        raise InputError(
            f"{passed[0]!r} is unexpected: --model names the model, and only vLLM's own options "
            "follow --"
        )
    model = options.model_or_bundled(model, supports_audio=True)
    arguments = vllm_arguments(model, policy, host, port, given, passed, has_key=key is not None)
    check_installed()
    _warn_of_no_key(host, key)
    become_vllm(arguments, key)


def _warn_of_no_key(host: str, key: str | None) -> None:
    from oscar_mm.apps.guard import is_loopback  # requires the server's packages

    if key is None and not is_loopback(host):
        print(
            "oscar-mm: warning: no API key: anyone on the network can use the server",
            file=sys.stderr,
        )


def media_domains(given: Sequence[str] | None, *, allow_remote: bool) -> list[str]:
    """Return the hosts of all ``--allowed-media-domains`` options; an empty list allows any host.

    Raises:
        InputError: if hosts are listed without ``--allow-remote``, or one is not a host name.
    """
    names = [name.strip() for text in given or () for name in text.split(",")]
    if given and not allow_remote:
        raise InputError("--allowed-media-domains has no effect without --allow-remote: set both")
    if names:
        from oscar_mm.media.source import AllowedHosts

        try:
            AllowedHosts(names)
        except InputError as error:
            raise InputError(f"--allowed-media-domains: {error}") from None
    return names


def prefix_bytes(size: str | None, budget: int | None) -> int | None:
    """Return the prefix cache size in bytes that --prefix-cache requests; None for no prefix cache.

    Raises:
        InputError: if ``size`` is not a valid size.
    """
    if size is None:
        return parse_bytes("--prefix-cache", _PREFIXES if budget is None else max(1, budget // 4))
    return None if size in ("0", "off") else parse_bytes("--prefix-cache", size)
