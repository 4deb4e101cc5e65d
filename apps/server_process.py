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
    """Sockets, one for each address of a name; none takes connections before its ``listen``.

    Args:
        host: name or address of this machine.
        port: 0 for a free one.

    Raises:
        InputError: no such name or address, or the port is taken.
    """
    try:
        found = socket.getaddrinfo(
            _bare(host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise InputError(f"--host {host}: is no known name or address ({error})") from None
    sockets, absent = [], None
    with ExitStack() as opened:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                made = opened.enter_context(socket.socket(family, kind, protocol))
                if os.name == "posix":  # Windows would share a port that is taken.
                    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                made.bind(address)
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise _unusable(host, port, error) from None
                # A machine without IPv6 may know localhost by ::1 too.
                absent = error
            else:
                sockets.append(made)
        if not sockets and absent is not None:
            raise _unusable(host, port, absent)
        opened.pop_all()
    return sockets


def listen(sockets: Iterable[socket.socket]) -> None:
    """Take connections.

    Raises:
        InputError: another server, which was loading too, has the port now.
    """
    for one in sockets:
        host, port = one.getsockname()[:2]
        try:
            one.listen()
        except OSError as error:
            raise _unusable(host, port, error) from None


def url(host: str, port: int) -> str:
    """The address for clients."""
    host = _bare(host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _bare(host: str) -> str:
    """Of IPv6 without the brackets of URLs."""
    return host.removeprefix("[").removesuffix("]")


def _unusable(host: str, port: int, error: OSError) -> InputError:
    return InputError(
        f"--host {host} --port {port}: cannot be used ({error.strerror}): give another --port, or "
        "an address of this machine"
    )


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """In the block SIGTERM does what Ctrl-C does; once, so that it does not disturb the end."""

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
