"""Server processes: their sockets and signals, and servers that another process owns."""

import atexit
import errno
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from oscar_mm.errors import InputError

_MODULE = "oscar_mm.apps.server_process"
_POLL_S = 0.2
_TELL_S = 30.0
"""Interval between messages that a server is still loading, in seconds."""
_END_S = 15.0
"""Maximum seconds to let a server exit before it is killed."""
_SWITCH_S = 0.0001
"""Seconds after which a thread that waits for the interpreter has it. With 0.5 ms, 64 clients of a
server got 4,564 tokens/s; with 0.1 ms, 4,870 (8B, prompts of 2,000 tokens, H200)."""
_COLLECTED_AFTER = 2_500
"""Number of new objects, less those that were freed, after which the youngest are collected."""
_OLDER_COLLECTED_AFTER = 200
"""Number of such collections after which older objects are collected."""
_LOG_BYTES = 1 << 16
_LOG_LINES = 10
_ERROR = re.compile(r"\w(Error|Exception): ")


def bind(host: str, port: int) -> list[socket.socket]:
    """Bind a socket to each address of a host; connections are refused until ``listen`` is called.

    This reserves a server's port before its model is loaded, because loading takes a long time.

    Args:
        host: host name or address of this machine.
        port: port number; 0 selects a free port.

    Raises:
        InputError: if the name or address is unknown, or the port is taken.
    """
    try:
        addresses = socket.getaddrinfo(
            _bare(host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise InputError(
            f"--host {host}: is not a known name or address ({error}); pass a name or an address "
            "of this machine"
        ) from None
    sockets, absent = [], None
    with ExitStack() as opened:
        for family, kind, protocol, _, address in dict.fromkeys(addresses):
            try:
                sock = opened.enter_context(socket.socket(family, kind, protocol))
                if os.name == "posix":  # Windows would share a port that is in use.
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.bind(address)
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise _unusable(host, port, error) from None
                # A machine without IPv6 may still resolve localhost to ::1.
                absent = error
            else:
                sockets.append(sock)
        if not sockets and absent is not None:
            raise _unusable(host, port, absent)
        opened.pop_all()
    return sockets


def listen(sockets: Iterable[socket.socket]) -> None:
    """Start accepting connections.

    Raises:
        InputError: if another server has bound the same port and is already listening.
    """
    for sock in sockets:
        host, port = sock.getsockname()[:2]
        try:
            sock.listen()
        except OSError as error:
            raise _unusable(host, port, error) from None


def url(host: str, port: int) -> str:
    """Return the URL that clients use to reach a server."""
    host = _bare(host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _bare(host: str) -> str:
    """Return a host without the brackets that enclose IPv6 addresses in URLs."""
    return host.removeprefix("[").removesuffix("]")


def _unusable(host: str, port: int, error: OSError) -> InputError:
    return InputError(
        f"--host {host} --port {port}: cannot be used ({error.strerror}); pass another --port, or "
        "an address of this machine as --host"
    )


def freeze_loaded() -> None:
    """Exclude all existing objects from garbage collection, and collect others less often; call
    this once everything is loaded.

    Otherwise each collection scans the many objects of modules, processor and libraries, and
    preparing a short request takes two to three times as long. A decode step of many requests also
    makes thousands of objects, most of which live until the next step: with Python's default, 700,
    each step would be scanned several times. The objects of a request live until its answer ends,
    and few are in cycles. With thresholds of 10,000 new objects and of 10 collections, Python's
    default, collections stopped a server of 256 requests for 45 to 80 ms every 2.5 s, and sometimes
    for 170 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECTED_AFTER, _OLDER_COLLECTED_AFTER, *gc.get_threshold()[2:])
    # Otherwise, libraries complain at exit that their objects were not destroyed.
    atexit.register(gc.unfreeze)


@contextmanager
def short_thread_turns() -> Iterator[None]:
    """Within the block, let a thread that waits for the interpreter have it after 0.1 ms.

    The engine thread gives up the interpreter at each operation on the GPU. With Python's 5 ms,
    threads that prepare requests kept it for so long that the GPU waited.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Within the block, make the first SIGTERM act like Ctrl-C, and ignore further SIGTERM signals,
    which would disturb the shutdown."""

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


class OwnedServer:
    """Server in a separate process, which ends when this process ends, even if it is killed.

    A keeper process runs the server. It ends the server and all its children as soon as the pipe
    from this process is closed.

    Args:
        name: name of the server in messages.
        command: program of the server and its arguments.
        environment: all environment variables of the server.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._name, self._log = name, tempfile.TemporaryFile()  # noqa: SIM115 closed in close
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", _MODULE, *command],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Only this process should get Ctrl-C.
        )

    def wait_until(self, answers: Callable[[], bool], seconds: float) -> None:
        """Wait until the server answers, and report progress; end it if it does not answer in time.

        Args:
            answers: function that returns whether the server answers.
            seconds: maximum time to wait, in seconds.

        Raises:
            InputError: if the server has exited, or does not answer in time; the message quotes the
                server's log.
        """
        start, told = time.monotonic(), 0
        while not answers():
            if self._keeper.poll() is not None:
                raise InputError(f"{self._name} exited before it responded{self.close()}")
            waited = time.monotonic() - start
            if waited > seconds:
                raise InputError(f"{self._name} did not respond in {seconds:.0f} s{self.close()}")
            if waited > _TELL_S * (told + 1):
                told += 1
                print(
                    f"oscar-mm: {self._name} has been loading for {waited:.0f} s", file=sys.stderr
                )
            time.sleep(_POLL_S)

    def close(self) -> str:
        """End the server; return the errors in its log, or else its last lines, as one line."""
        if self._log.closed:
            return ""
        if self._keeper.stdin is not None:
            self._keeper.stdin.close()
        self._keeper.wait()
        with self._log as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_BYTES))
            lines = log.read().decode(errors="replace").split("\n")
        lines = list(dict.fromkeys(" ".join(line.split()) for line in lines if line.strip()))
        errors = [line for line in lines if _ERROR.search(line)]
        text = " | ".join((errors or lines)[-_LOG_LINES:])
        return text and f"; its log: {text}"


def _keep(command: Sequence[str]) -> None:
    """Run a command until the command or stdin ends, then kill this process's own process group."""
    if os.fork():
        # Fork, because when a worker ends, Ray kills its children but not their children.
        os.wait()
        return
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def end_with_stdin() -> None:
        sys.stdin.buffer.read()
        server.terminate()
        time.sleep(_END_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_stdin, daemon=True).start()
    server.wait()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    _keep(sys.argv[1:])
