"""The process of a server: the sockets on which it listens, and the signal that ends it."""

import errno
import os
import signal
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from oscar_mm.errors import InputError


def bind(host: str, port: int) -> list[socket.socket]:
    """Bind a socket to each address of a name; none takes connections before ``listen``.

    A server claims its port by this before its model takes its time to load.

    Args:
        host: name or address of this machine.
        port: 0 for a free one.

    Raises:
        InputError: the name or address is unknown, or the port is taken.
    """
    try:
        addresses = socket.getaddrinfo(
            _bare(host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise InputError(f"--host {host}: is not a known name or address ({error})") from None
    sockets, absent = [], None
    with ExitStack() as opened:
        for family, kind, protocol, _, address in dict.fromkeys(addresses):
            try:
                sock = opened.enter_context(socket.socket(family, kind, protocol))
                if os.name == "posix":  # Windows would share a port in use.
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.bind(address)
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise _unusable(host, port, error) from None
                # A machine without IPv6 may still give localhost the address ::1.
                absent = error
            else:
                sockets.append(sock)
        if not sockets and absent is not None:
            raise _unusable(host, port, absent)
        opened.pop_all()
    return sockets


def listen(sockets: Iterable[socket.socket]) -> None:
    """Take connections.

    Raises:
        InputError: another server has bound the same port and listens already.
    """
    for sock in sockets:
        host, port = sock.getsockname()[:2]
        try:
            sock.listen()
        except OSError as error:
            raise _unusable(host, port, error) from None


def url(host: str, port: int) -> str:
    """Return the address for clients."""
    host = _bare(host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _bare(host: str) -> str:
    """Remove the brackets that URLs put around IPv6 addresses."""
    return host.removeprefix("[").removesuffix("]")


def _unusable(host: str, port: int, error: OSError) -> InputError:
    return InputError(
        f"--host {host} --port {port}: cannot be used ({error.strerror}): give another --port, or "
        "an address of this machine"
    )


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Make SIGTERM do inside what Ctrl-C does, but once, so that it does not disturb the end."""

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
