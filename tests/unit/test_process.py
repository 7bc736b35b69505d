import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tmover import process
from tmover.process import ProcessId

Child = subprocess.Popen[bytes]


@pytest.fixture
def sleeper() -> Iterator[Child]:
    child = subprocess.Popen(["sleep", "1000"], env={"TMOVER_TEST_MARK": "a"})
    yield child
    child.kill()
    child.wait()


def known(child: Child) -> ProcessId:
    found = process.identify(child.pid)
    assert found is not None
    return found


def test_a_process_is_known_by_pid_and_start(sleeper: Child) -> None:
    running = known(sleeper)

    assert process.is_alive(running)
    assert not process.is_alive(running._replace(ticks=running.ticks - 1))


def test_a_zombie_is_gone(sleeper: Child) -> None:
    running = known(sleeper)

    sleeper.kill()

    assert process.wait_gone([running], timeout_s=10) == set()
    assert process.identify(sleeper.pid) is None
    assert not process.is_alive(running)
    assert process.exit_status(running) == -signal.SIGKILL


def test_waiting_for_what_does_not_end_gives_up(sleeper: Child) -> None:
    assert process.wait_gone([known(sleeper)], timeout_s=0.01) == {known(sleeper)}


def test_a_signal_reaches_only_the_process_that_was_meant(sleeper: Child) -> None:
    running = known(sleeper)

    process.send_signal(running._replace(ticks=1), signal.SIGKILL)

    assert process.is_alive(running)
    process.send_signal(running, signal.SIGKILL)
    assert sleeper.wait() == -signal.SIGKILL


def test_a_stopped_process_is_told_from_a_running_one(sleeper: Child) -> None:
    running = known(sleeper)
    assert not process.is_stopped(running)

    os.kill(sleeper.pid, signal.SIGSTOP)
    os.waitpid(sleeper.pid, os.WUNTRACED)

    assert process.is_stopped(running)


def test_processes_are_found_by_their_environment(sleeper: Child) -> None:
    assert process.marked("TMOVER_TEST_MARK", "a") == {known(sleeper)}
    assert process.marked("TMOVER_TEST_MARK", "") == set()


def test_grandchildren_are_descendants_and_not_children() -> None:
    shell = subprocess.Popen(["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE)
    with shell:
        assert shell.stdout is not None
        grandchild = process.identify(int(shell.stdout.readline()))
        assert grandchild is not None

        assert process.descendants(shell.pid) == {known(shell), grandchild}
        assert process.children(shell.pid) == [grandchild]
        assert known(shell) in process.children(os.getpid())
        assert {known(shell), grandchild} <= process.descendants(os.getpid())
        for one in (grandchild, known(shell)):
            process.send_signal(one, signal.SIGKILL)
        process.wait_gone([grandchild], timeout_s=10)
        process.reap(grandchild.pid)


def test_reaping_says_whether_there_is_nothing_left_to_collect(sleeper: Child) -> None:
    assert not process.reap(sleeper.pid)
    assert process.reap(1)  # no child of ours


INNER = "from tmover.process import die_with_parent as die; die({}); print(1, flush=True); input()"
OUTER = f"""
import os, subprocess, sys
inner = {INNER!r}.format(os.getpid() if sys.argv[1] == "named" else "")
argv, pipe = [sys.executable, "-c", inner], subprocess.PIPE
child = subprocess.Popen(argv, stdin=pipe, stdout=pipe)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.parametrize("parent", ["named", "unnamed"])
def test_a_process_ends_when_its_parent_is_killed(parent: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OUTER, parent], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    ) as outer:
        assert outer.stdout is not None
        inner = process.identify(int(outer.stdout.readline()))
        assert inner is not None

        outer.kill()

        assert process.wait_gone([inner], timeout_s=10) == set()
    process.reap(inner.pid)


def test_a_process_whose_parent_was_gone_before_ends_at_once() -> None:
    code = "from tmover.process import die_with_parent; die_with_parent(1)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "exited with code 0"), (-11, "was ended by SIGSEGV"), (-200, "was ended by signal 200")],
)
def test_an_exit_status_is_told_in_words(code: int, words: str) -> None:
    assert process.describe(code) == words
