"""EngineThread: calls of other threads, and threads that wait for steps."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from oscar_mm.engine.engine_call import Call
from oscar_mm.engine.engine_thread import EngineThread
from oscar_mm.errors import MemoryBusy
from tests.processes import FORKS

posix = pytest.mark.skipif(not FORKS, reason="needs fork and signals between processes")


class Steps:
    """Scheduler with one request of a number of steps."""

    def __init__(self, thread: EngineThread, left: int = 0) -> None:
        self.thread, self.left, self.made = thread, left, 0
        self.error: BaseException | None = None
        self.failed: BaseException | None = None
        self.freed = self.is_ahead = False
        self.between: Callable[[], object] = bool
        thread.add(self)

    @property
    def is_running(self) -> bool:
        return self.left > 0

    @property
    def has_work(self) -> bool:
        return self.left > 0

    def drop_ended(self) -> None:
        """Do nothing: the request ends by its steps."""

    def unblock(self) -> None:
        self.freed = False

    def advance(self) -> None:
        if self.error is not None:
            raise self.error
        self.between()
        self.thread.run_calls()
        self.left -= 1
        self.made += 1

    def fail_all(self, error: BaseException) -> None:
        self.failed, self.left = error, 0


def test_calls_run_in_one_thread_in_order() -> None:
    thread, order = EngineThread(), list[int]()
    idents = {thread.call(threading.get_ident) for _ in range(3)}
    assert len(idents) == 1 and threading.get_ident() not in idents
    for index in range(100):
        thread.post(lambda index=index: order.append(index))
    assert thread.call(lambda: thread.call(lambda: list(order))) == [*range(100)]


def test_an_error_is_that_of_the_caller() -> None:
    thread = EngineThread()
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 // 0)
    with pytest.raises(KeyboardInterrupt):
        thread.call(lambda: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(MemoryBusy):
        thread.call(lambda: (_ for _ in ()).throw(MemoryBusy("full")))
    assert thread.call(lambda: 1) == 1


def test_steps_are_made_while_a_thread_waits() -> None:
    thread = EngineThread()
    steps = Steps(thread, 10)
    thread.call(lambda: None)
    time.sleep(0.02)
    assert steps.made == 0
    thread.run_until(lambda: steps.made >= 4)
    thread.call(lambda: None)
    assert steps.made == 4
    with ThreadPoolExecutor(4) as pool:
        waits = [pool.submit(thread.run_until, lambda n=n: steps.made >= n) for n in (5, 10, 7, 9)]
        for wait in waits:
            wait.result(10)
    assert steps.made == 10


def test_a_wait_without_work_ends_by_a_call() -> None:
    thread, found = EngineThread(), list[int]()
    wait = threading.Thread(target=thread.run_until, args=[lambda: bool(found)])
    wait.start()
    wait.join(0.05)
    assert wait.is_alive()
    thread.call(lambda: found.append(1))
    wait.join(10)
    assert not wait.is_alive()


def test_all_schedulers_step_while_a_thread_waits_for_one() -> None:
    thread = EngineThread()
    first, second = Steps(thread, 5), Steps(thread, 3)
    thread.run_until(lambda: not first.left)
    assert first.made == 5 and second.made == 3


def test_stepping_without_a_thread_that_waits() -> None:
    thread, seen = EngineThread(), list[int]()
    steps = Steps(thread)
    with thread.keep_stepping(lambda: seen.append(steps.made)):
        steps.left = 5
        thread.wake()
        thread.run_until(lambda: not steps.left)
    assert seen == [1, 2, 3, 4, 5]
    steps.left = 5
    thread.wake()
    thread.call(lambda: None)
    assert steps.made == 5


def test_watchers_wait_until_the_next_step_is_launched() -> None:
    thread, events = EngineThread(), list[str]()
    steps = Steps(thread)

    def launch() -> None:
        events.append("launched")
        thread.call_watchers()
        steps.is_ahead = steps.left > 1  # The last one has no successor.

    steps.between = launch
    with thread.keep_stepping(lambda: events.append("called")):
        steps.left = 3
        thread.wake()
        thread.run_until(lambda: not steps.left)
        assert thread.call(lambda: events) == ["launched", *["launched", "called"] * 2, "called"]
        # Here, the device computes a step that nobody needs any more.
        steps.left, steps.between = 1, lambda: setattr(steps, "is_ahead", True)
        thread.wake()
        thread.run_until(lambda: not steps.left)
        assert thread.call(lambda: events[-2:]) == ["called", "called"]


def test_watchers_do_not_wait_for_a_call_that_runs_the_model() -> None:
    thread, events = EngineThread(), list[str]()
    steps = Steps(thread)
    call = Call(lambda: events.append("model"))

    def launch() -> None:
        steps.is_ahead = steps.left > 1
        if steps.left == 2:
            thread._passes.append(call)

    steps.between = launch
    with thread.keep_stepping(lambda: events.append("called")):
        steps.left = 2
        thread.wake()
        thread.run_until(lambda: not steps.left)
        assert thread.call(lambda: events) == ["called", "model", "called"]


def test_an_error_of_a_step_fails_its_requests_alone() -> None:
    thread = EngineThread()
    broken, right = Steps(thread, 5), Steps(thread, 5)
    broken.error = KeyboardInterrupt()
    thread.run_until(lambda: not (broken.left or right.left))
    assert broken.failed is broken.error and right.made == 5


def test_a_call_that_runs_the_model_waits_for_the_end_of_a_pass() -> None:
    thread, order = EngineThread(), list[str]()
    steps = Steps(thread, 1)
    inside, posted = threading.Event(), threading.Event()

    def between() -> None:
        inside.set()
        assert posted.wait(10)
        thread.run_calls()
        order.append("end of the pass")

    steps.between = between
    with ThreadPoolExecutor(3) as pool:
        wait = pool.submit(thread.run_until, lambda: not steps.left)
        assert inside.wait(10)
        passes = pool.submit(thread.call, lambda: order.append("pass"), runs_model=True)
        while not thread.has_calls:
            time.sleep(0.001)
        brief = pool.submit(thread.call, lambda: order.append("call"))
        while thread._inbox.qsize() < 2:
            time.sleep(0.001)
        posted.set()
        for future in (wait, passes, brief):
            future.result(10)
    assert order == ["call", "end of the pass", "pass"]


def test_a_call_makes_tensors_that_can_be_changed() -> None:
    """Also between the layers of a prompt, where the engine is in inference mode."""
    thread = EngineThread()
    steps, made = Steps(thread, 1), list[torch.Tensor]()

    def between() -> None:
        thread.post(lambda: None)
        with torch.inference_mode():
            call = ThreadPoolExecutor(1)
            future = call.submit(thread.call, lambda: torch.zeros(3, requires_grad=True) + 1)
            while not future.done():
                thread.run_calls()
            made.append(future.result())

    steps.between = between
    thread.run_until(lambda: not steps.left)
    assert not made[0].is_inference() and not made[0].requires_grad
    made[0][0] = 2.0


def test_a_call_that_does_not_begin_in_time_never_runs() -> None:
    thread, begun, over, ran = EngineThread(), threading.Event(), threading.Event(), list[int]()

    def busy() -> int:
        begun.set()
        over.wait()
        return 7

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(thread.call, busy)
        assert begun.wait(10)
        with pytest.raises(TimeoutError, match=r"busy for more than 0\.02 s"):
            thread.call(lambda: ran.append(1), timeout=0.02)
        over.set()
        assert holding.result(10) == 7
    # A call that has begun is waited for.
    assert thread.call(lambda: time.sleep(0.1) or 3, timeout=0.05) == 3
    assert not ran


@posix
def test_an_interrupt_ends_the_wait_and_not_the_step(request: pytest.FixtureRequest) -> None:
    # A background job ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    thread = EngineThread()
    steps = Steps(thread, 1)
    inside, over = threading.Event(), threading.Event()

    def between() -> None:
        inside.set()
        over.wait()

    def interrupt() -> None:
        inside.wait()
        os.kill(os.getpid(), signal.SIGINT)

    steps.between = between
    killer = threading.Thread(target=interrupt)
    killer.start()
    with pytest.raises(KeyboardInterrupt):
        thread.run_until(lambda: not steps.left)
    assert not steps.made
    ran = list[int]()
    inside.clear()
    killer = threading.Thread(target=interrupt)
    killer.start()
    with pytest.raises(KeyboardInterrupt):
        inside.set()
        thread.call(lambda: ran.append(1))
    over.set()
    thread.run_until(lambda: not steps.left)
    thread.call(lambda: None)
    assert steps.made == 1 and not ran


@posix
def test_a_forked_process_has_its_own_thread() -> None:
    thread = EngineThread()
    steps = Steps(thread, 3)
    ident = thread.call(threading.get_native_id)
    child = os.fork()
    if not child:
        thread.run_until(lambda: not steps.left)
        right = thread.call(threading.get_native_id) != ident and steps.made == 3
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert thread.call(threading.get_native_id) == ident and steps.made == 0


def test_the_thread_ends_with_its_object() -> None:
    thread = EngineThread()
    ident = thread.call(threading.get_ident)
    running = [x for x in threading.enumerate() if x.ident == ident]
    assert len(running) == 1
    del thread
    gc.collect()
    running[0].join(10)
    assert not running[0].is_alive()


def test_an_error_of_a_watcher_ends_nothing(caplog) -> None:
    thread = EngineThread()
    steps = Steps(thread, 5)
    with thread.keep_stepping(lambda: 1 // 0):
        thread.run_until(lambda: not steps.left)
    assert steps.made == 5 and "after each step failed" in caplog.text


@posix
def test_the_interpreter_waits_at_exit_for_the_end_of_a_step(tmp_path) -> None:
    """An early handler may still call the engine, whose thread has ended by then."""
    program = tmp_path / "program.py"
    program.write_text(_INTERRUPTED)
    process = subprocess.Popen(
        [sys.executable, program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "stepping\n"
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert said == "step made\ncalled at exit\n"
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert process.returncode == -signal.SIGINT


_INTERRUPTED = """
import atexit, signal, time
from oscar_mm.engine.engine_thread import EngineThread

class Steps:
    freed, is_ahead, is_running, has_work = False, False, True, True
    drop_ended = unblock = fail_all = lambda *_: None

    def advance(self):
        print("stepping", flush=True)
        time.sleep(0.5)
        print("step made", flush=True)

signal.signal(signal.SIGINT, signal.default_int_handler)  # A background job ignores it.
thread, steps = EngineThread(), Steps()
atexit.register(lambda: thread.call(lambda: print("called at exit", flush=True)))
thread.add(steps)
thread.run_until(lambda: False)
"""
