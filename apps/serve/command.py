"""`oscar-mm serve`: the model for other programs, over HTTP."""

import sys
from typing import Annotated

import typer

from oscar_mm.apps import options, progress
from oscar_mm.errors import InputError
from oscar_mm.policy import KVPolicy
from oscar_mm.sizes import parse_bytes

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(
    model: options.Model = None,
    policy: options.Policy = "compact",
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to listen; 0.0.0.0 is everywhere.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", help="Port.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", envvar="OSCAR_MM_API_KEY", help="Clients must send it; default: none."
        ),
    ] = None,
    kv_budget: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help='KV memory of all conversations, such as "8GB".'),
    ] = None,
    max_context: options.MaxContext = None,
    max_new_tokens: options.MaxNewTokens = 1024,
    max_request: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest request, media in base64 included.")
    ] = "64MB",
    running: Annotated[int, typer.Option(metavar="N", help="Answers written at once.")] = 4,
    waiting: Annotated[int, typer.Option(metavar="N", help="Requests in the queue.")] = 64,
    conversations: Annotated[
        int, typer.Option(metavar="N", help="Conversations that are kept.")
    ] = 64,
    device: options.Device = None,
    device_map: options.DeviceMap = None,
    dtype: options.Dtype = None,
) -> None:
    """Serve OpenAI's chat-completions protocol: text, images, recordings; streaming.

    A conversation goes on from its kept cache. GET /metrics is for Prometheus.
    """
    KVPolicy.preset(policy)
    size = parse_bytes("--max-request", max_request)
    for name, value in (("running", running), ("conversations", conversations)):
        if value < 1:
            raise InputError(f"--{name} {value}: must be at least 1")
    if waiting < 0 or not 0 < port < 65536:
        raise InputError("--waiting must be at least 0 and --port from 1 to 65535")
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise InputError(
            f"serve needs the package {error.name}: pip install 'oscar-mm[serve]'"
        ) from None
    model = options.chosen_model(model, hears=True)
    progress.on_loading()
    from oscar_mm.apps.serve.server import Bounds, create_app  # brings torch
    from oscar_mm.pipelines import pipeline_for

    pipe = pipeline_for(model)(
        model,
        policy=policy,
        device=device,
        device_map=device_map,
        dtype=dtype,
        max_context=max_context,
        kv_budget=kv_budget,
    )
    if host not in _LOOPBACK and api_key is None:
        print("oscar-mm: warning: no --api-key: anybody on the network can ask", file=sys.stderr)
    bounds = Bounds(
        api_key=api_key,
        max_request_bytes=size,
        max_new_tokens=max_new_tokens,
        running=running,
        waiting=waiting,
        conversations=conversations,
    )
    app = create_app(pipe, model, bounds)
    print(f"{model} at http://{host}:{port}/v1", file=sys.stderr)
    uvicorn.run(app, host=host, port=port, log_level="warning")
