"""VllmSettings: a worker starts vLLM's server for itself, and asks it."""

from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass, field

import httpx

from oscar_mm.apps.audio_qa.engine import AnswerSettings, WorkerSettings
from oscar_mm.apps.audio_qa.server_worker import ServerSettings, ServerWorker
from oscar_mm.apps.serve.vllm_server import check_installed, vllm_arguments, vllm_command
from oscar_mm.apps.server_process import OwnedServer, bind, url
from oscar_mm.media import MediaLimits

_HOST = "127.0.0.1"
_LONGEST_START_S = 3600.0
"""Seconds that a server has to fetch and load its model."""
_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class VllmSettings:
    """What the server of a worker loads, and how it is asked.

    Attributes:
        model: name of a bundled model, folder or hub id.
        policy: preset, with changes or without, whose pages vLLM stores.
        settings: how to answer.
        concurrency: most requests at once.
        kv_budget: bytes of keys and values; None for all memory that vLLM finds.
        allow_remote: fetch media that are http(s) addresses; the server gets them as bytes.
        limits: bounds on media.

    Raises:
        InputError: vLLM cannot store the policy, there is no such model, or ``concurrency`` cannot
            be used.
    """

    model: str
    policy: str
    settings: AnswerSettings
    concurrency: int = 32
    kv_budget: int | None = None
    allow_remote: bool = False
    limits: MediaLimits = field(default_factory=MediaLimits)

    uses_gpu = True
    """A worker takes a GPU where there is one."""

    def __post_init__(self) -> None:
        self._arguments(port=0)
        self._server_settings(port=0, key="")

    def start(self) -> ServerWorker:
        """Start a server on a free port, and return a worker that owns and asks it.

        Raises:
            InputError: vLLM is missing, or its server ended or did not answer in an hour.
        """
        check_installed()
        [sock] = bind(_HOST, 0)
        with sock:
            port = sock.getsockname()[1]
        plan = self._server_settings(port, secrets.token_urlsafe())
        command = vllm_command(self._arguments(port), plan.api_key)
        print(f"oscar-mm: vLLM's server starts, with {self.model}", file=sys.stderr)
        server = OwnedServer("vLLM's server", *command)
        try:
            with httpx.Client(
                headers={"Authorization": f"Bearer {plan.api_key}"},
                timeout=_TIMEOUT_S,
                trust_env=False,
            ) as client:
                server.wait_until(lambda: _answers(client, plan.endpoint), _LONGEST_START_S)
            return ServerWorker(plan, server)
        except BaseException:
            server.close()
            raise

    def _arguments(self, port: int) -> list[str]:
        options = {
            "max_context": "auto",  # as much as the KV memory holds, else the model's own
            **({} if self.kv_budget is None else {"kv_budget": self.kv_budget}),
            **({} if self.settings.dtype is None else {"dtype": self.settings.dtype}),
        }
        return vllm_arguments(self.model, self.policy, _HOST, port, options, has_key=True)

    def _server_settings(self, port: int, key: str) -> ServerSettings:
        return ServerSettings(
            url(_HOST, port),
            self.settings,
            self.model,
            self.concurrency,
            key,
            self.allow_remote,
            self.limits,
        )


def _answers(client: httpx.Client, endpoint: str) -> bool:
    try:
        return client.get(f"{endpoint}/models").is_success
    except httpx.TransportError:
        return False


Plan = WorkerSettings | ServerSettings | VllmSettings
"""What each worker of a run loads, asks or starts."""
