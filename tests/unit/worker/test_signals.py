"""SIGUSR1 and SIGUSR2 at a worker, and at the processes it starts."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from tmover.worker.signals import CheckpointSignal

STARTS = """
import multiprocessing, multiprocessing.forkserver, multiprocessing.resource_tracker
import os, signal, sys
from tmover.worker import signals

def work(end):
    end.recv()

def main(method):
    signals.listen()
    context = multiprocessing.get_context(method)
    near, far = context.Pipe()
    worker = context.Process(target=work, args=(far,))
    worker.start()
    helpers = (
        multiprocessing.resource_tracker._resource_tracker._pid,
        multiprocessing.forkserver._forkserver._forkserver_pid,
    )
    for pid in (worker.pid, *helpers):
        if pid is not None:
            os.kill(pid, signal.SIGUSR1)
            os.kill(pid, signal.SIGUSR2)
    near.send("end")
    worker.join()
    second = context.Process(target=os.getpid)
    second.start()
    second.join()
    print(worker.exitcode, second.exitcode, signal.pthread_sigmask(signal.SIG_BLOCK, ()))

if __name__ == "__main__":
    main(sys.argv[1])
"""
BEFORE = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
for number in (signal.SIGUSR1, signal.SIGUSR2):
    os.kill(os.getpid(), number)
"""
LISTENS = """
from tmover.worker import signals
requests = signals.listen()
"""
ASKS = """
import os, signal
os.kill(os.getpid(), signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGUSR2)
"""
HANDLES = """
import signal
signal.signal(signal.SIGUSR1, lambda *_: print("the script's own"))
"""
READS = """
import ctypes, os, threading
near, far = os.pipe()
def disturb():
    os.kill(os.getpid(), signal.SIGUSR1)
    os.write(far, b"x")
threading.Timer(0.2, disturb).start()
print(ctypes.CDLL(None).read(near, ctypes.create_string_buffer(1), 1))
"""
TELLS = "print(requests.take(), signals.listen().take())"


class Clock:
    """Stands until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def requests(clock: Clock) -> CheckpointSignal:
    return CheckpointSignal(clock)


def run(*arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout.splitlines()


def test_without_a_signal_nothing_is_asked_for(requests: CheckpointSignal) -> None:
    assert not requests.take()


def test_the_same_signal_twice_is_one_request(clock: Clock, requests: CheckpointSignal) -> None:
    requests.note()
    asked = requests.take()
    clock.now += 0.9
    requests.note()

    assert (asked, requests.take()) == (True, False)


def test_a_later_signal_asks_again(clock: Clock, requests: CheckpointSignal) -> None:
    requests.note()
    requests.take()
    clock.now += 0.9
    requests.note()
    clock.now += 0.2
    requests.note()

    assert (requests.take(), requests.take()) == (True, False)


def test_a_signal_just_after_the_checkpoint_was_another_ranks_request(
    clock: Clock, requests: CheckpointSignal
) -> None:
    requests.answered()
    requests.note()
    late = requests.take()
    clock.now += 1.0
    requests.note()

    assert (late, requests.take()) == (False, True)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_loader_workers_do_not_die_of_it_however_early_it_comes(
    tmp_path: pathlib.Path, method: str
) -> None:
    script = tmp_path / "starts.py"
    script.write_text(STARTS)

    assert run(str(script), method) == ["0 0 set()"]


def test_what_came_before_the_worker_listened_is_heard_then() -> None:
    assert run("-c", BEFORE + LISTENS + TELLS) == ["True False"]


def test_it_is_heard_and_ends_nothing() -> None:
    assert run("-c", LISTENS + ASKS + TELLS) == ["True False"]


def test_native_code_that_waits_is_not_interrupted() -> None:
    assert run("-c", LISTENS + "import signal" + READS + TELLS) == ["1", "True False"]


@pytest.mark.parametrize("order", [LISTENS + HANDLES, HANDLES + LISTENS], ids=["later", "before"])
def test_a_handler_of_the_scripts_own_is_the_one_that_is_called(order: str) -> None:
    assert run("-c", order + ASKS + TELLS) == ["the script's own", "False False"]


def test_a_thread_that_listens_first_does_no_harm() -> None:
    first = "import threading; from tmover.worker import signals\n"
    first += "t = threading.Thread(target=signals.listen); t.start(); t.join()"

    assert run("-c", first + LISTENS + TELLS) == ["False False"]
