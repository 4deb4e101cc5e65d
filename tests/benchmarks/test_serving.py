"""The clients of the serving benchmark against a small server."""

import psutil
import pytest

pytest.importorskip("fastapi", reason="needs fastapi")

from benchmarks.serving import Clients, chat_request, friendly, hostile, text
from tests.apps.serve.conftest import omni, served  # noqa: F401


def test_all_are_answered_whatever_others_send(omni) -> None:  # noqa: F811
    before = omni.store.memory().used_bytes
    with served(omni) as address:
        clients = Clients(int(address.rpartition(":")[2]), psutil.Process())
        row = clients.identical(chat_request(text("Why?")), clients=8, count=4)
        assert (row["answered"], row["not answered"]) == (32, 0)
        row = clients.mixed(clients=8, count=40, share=0.1)
        assert (row["answered"], row["not answered"]) == (36, 0)
        assert row["hostile by status"] == {"400": 3, "499": 1}
        assert row["p50 ms"] <= row["p99 ms"] and row["RSS peak MB"] > 0
    assert omni.store.memory().used_bytes == before


def test_hostile_requests_are_small_enough_to_be_read() -> None:
    assert all(len(body) < 64 << 20 for body in [*hostile(), *friendly(0)])
