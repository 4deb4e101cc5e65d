"""Connections of clients that do not say what they want."""

import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


def connected(address: str) -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed it; what it has sent before is skipped."""
    try:
        while select.select([connection], [], [], 0)[0]:
            if not connection.recv(4096):
                return True
    except ConnectionError:
        return True
    return False


def seconds_until_closed(connection: socket.socket, trickle: bytes = b"") -> float:
    """How long the server leaves it open, though one more byte comes ever again."""
    start, sent = time.monotonic(), 0
    while not is_closed(connection):
        assert time.monotonic() - start < 10
        if sent < len(trickle):
            try:
                connection.sendall(trickle[sent : sent + 1])
            except ConnectionError:
                break
            sent += 1
        time.sleep(0.05)
    return time.monotonic() - start


@contextmanager
def opened(address: str, count: int, sent: bytes) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        connections = [stack.enter_context(connected(address)) for _ in range(count)]
        for connection in connections:
            try:
                connection.sendall(sent)
            except ConnectionError:
                continue
        yield connections
