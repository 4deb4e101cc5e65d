"""Where a server listens, claimed before its model loads."""

import os
import socket
import sys

import pytest

from oscar_mm.apps.server_process import OwnedServer, bind, listen, url
from oscar_mm.errors import InputError


def test_another_that_was_loading_too() -> None:
    """The later of two is told so; until then nobody can connect."""
    [first] = bind("127.0.0.1", 0)
    with first:
        port = first.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        [second] = bind("127.0.0.1", port)
        with second:
            listen([first])
            with pytest.raises(InputError, match=f"--port {port}: cannot be used"):
                listen([second])


def test_a_name_with_an_address_that_this_machine_has_not(monkeypatch) -> None:
    there = socket.getaddrinfo("127.0.0.1", 0, type=socket.SOCK_STREAM)
    gone = socket.getaddrinfo("192.0.2.1", 0, type=socket.SOCK_STREAM)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: gone + there)
    [one] = bind("localhost", 0)
    with one:
        assert one.getsockname()[0] == "127.0.0.1"


def test_url() -> None:
    assert url("::1", 80) == url("[::1]", 80) == "http://[::1]:80"
    assert url("localhost", 80) == "http://localhost:80"


def test_an_owned_server_that_does_not_answer() -> None:
    """Its log is in the message: the errors in it, or else the last lines."""
    for said, told in (("'a', 'b  c'", "a | b c"), ("'a', 'OSError: b', 'c'", "OSError: b")):
        program = f"import time; print({said}, sep='\\n', flush=True); time.sleep(600)"
        server = OwnedServer("It", [sys.executable, "-c", program], os.environ)
        with pytest.raises(InputError) as refused:
            server.wait_until(lambda: False, 1.0)
        assert str(refused.value) == f"It did not respond in 1 s; its log: {told}"
        assert server.close() == "", "it has been closed"
