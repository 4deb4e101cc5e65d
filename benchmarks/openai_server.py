"""An OpenAI server as a load sees it: its model, its /metrics and the memory of its processes."""

from __future__ import annotations

import os
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import openai
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.streaming_clients import TIMEOUT_S, Prompt

_POLL_S = 0.5
"""Seconds between two looks at the server."""
_IDLE_S = 10.0
"""Seconds in which a server must have ended all answers after the last client has gone."""
_RUNNING = ("oscar_mm_running", "vllm:num_requests_running")
_WAITING = ("oscar_mm_waiting", "vllm:num_requests_waiting")
_TIMES = {
    "first token": ("oscar_mm_first_token_seconds", "vllm:time_to_first_token_seconds"),
    "between tokens": ("oscar_mm_inter_token_seconds", "vllm:inter_token_latency_seconds"),
}
"""Names of metrics, ours and vLLM's."""


@dataclass
class Snapshot:
    """A server at one moment; what it does not report is None or empty.

    Attributes:
        running, waiting: requests.
        kv: KV bytes by modality.
        times: sum and count of the server's own times, by name.
        rss: bytes of the server's processes.
    """

    running: int | None = None
    waiting: int | None = None
    kv: dict[str, int] = field(default_factory=dict)
    times: dict[str, tuple[float, float]] = field(default_factory=dict)
    rss: int | None = None


class Server:
    """A server that answers a load.

    Args:
        url: its address, with or without /v1.
        process: its process, if this benchmark has started it.

    Attributes:
        model: the model's name at the server.
        maker: who made the server, such as "vllm".
        options: fields of a request for greedy answers of all tokens.
    """

    def __init__(self, url: str, process: psutil.Process | None = None) -> None:
        self.root = url.rstrip("/").removesuffix("/v1")
        self.process = process
        self.key = os.environ.get("OPENAI_API_KEY", "none")
        self.api = openai.OpenAI(base_url=f"{self.root}/v1", api_key=self.key, timeout=TIMEOUT_S)
        card = self.api.models.list().data[0]
        self.model, self.maker = card.id, card.owned_by
        self.options: dict[str, Any] = {"temperature": 0}
        if self.maker == "vllm":
            self.options["ignore_eos"] = True

    def prompt_tokens(self, prompt: Prompt, new_tokens: int = 1) -> int:
        """Tokens of a prompt, by the server's count."""
        answer = self.api.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": prompt.content}],  # pyright: ignore
            max_tokens=new_tokens,
            extra_body=self.options,
        )
        return answer.usage.prompt_tokens if answer.usage else 0

    def snapshot(self) -> Snapshot:
        """The server now."""
        values: defaultdict[str, float] = defaultdict(float)
        kv: dict[str, int] = {}
        request = urllib.request.Request(
            f"{self.root}/metrics", headers={"Authorization": f"Bearer {self.key}"}
        )
        with suppress(OSError, ValueError):
            page = urllib.request.urlopen(request, timeout=30).read().decode()
            for family in text_string_to_metric_families(page):
                for sample in family.samples:
                    values[sample.name] += sample.value
                    if sample.name == "oscar_mm_kv_bytes":
                        kv[sample.labels["modality"]] = int(sample.value)

        def total(names: Sequence[str]) -> float | None:
            return next((values[name] for name in names if name in values), None)

        running, waiting = total(_RUNNING), total(_WAITING)
        times = {}
        for name, metrics in _TIMES.items():
            counted = [total([f"{x}_{part}" for x in metrics]) for part in ("sum", "count")]
            if counted[1] is not None:
                times[name] = (counted[0] or 0.0, counted[1])
        return Snapshot(
            None if running is None else int(running),
            None if waiting is None else int(waiting),
            kv,
            times,
            self._rss(),
        )

    def _rss(self) -> int | None:
        if self.process is None:
            return None
        size = 0
        for process in (self.process, *self.process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                size += process.memory_info().rss
        return size


@contextmanager
def watch(server: Server) -> Iterator[list[Snapshot]]:
    """Inside, snapshots of a server are taken; the list has them all at the end."""
    snapshots, finished = [server.snapshot()], threading.Event()

    def look() -> None:
        while not finished.wait(_POLL_S):
            snapshots.append(server.snapshot())

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield snapshots
    finally:
        finished.set()
        watcher.join()
    deadline = time.monotonic() + _IDLE_S
    while (last := server.snapshot()).running and time.monotonic() < deadline:
        time.sleep(0.05)
    snapshots.append(last)


def server_figures(snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    """What the server reports: peaks, and values after the last answer."""
    before, after = snapshots[0], snapshots[-1]
    fullest = max(snapshots, key=lambda snapshot: sum(snapshot.kv.values()))
    row: dict[str, Any] = {}
    for name in ("running", "waiting"):
        seen = [getattr(one, name) for one in snapshots if getattr(one, name) is not None]
        if seen:
            row |= {f"{name} peak": max(seen), f"{name} end": seen[-1]}
    if after.kv:
        row |= {"KV bytes peak": fullest.kv, "KV bytes end": after.kv}
    means = {}
    for name, (seconds, count) in after.times.items():
        old_seconds, old_count = before.times.get(name, (0.0, 0.0))
        if count > old_count:
            means[name] = round((seconds - old_seconds) / (count - old_count) * 1000, 2)
    if means:
        row["server's means ms"] = means
    sizes = [one.rss >> 20 for one in snapshots if one.rss is not None]
    if sizes:
        row |= {"RSS MB before": sizes[0], "RSS MB peak": max(sizes), "RSS MB end": sizes[-1]}
    return row
