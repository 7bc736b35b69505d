"""A crew of shells, with one in torchrun's place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from support.eventually import eventually
from tmover.agent.crew import Crew, Loss
from tmover.process import ProcessId, identify, is_alive

PARENT = """
import subprocess, sys
children = []
for line in sys.stdin:
    if line == "collect\\n":
        children[0].wait()
        print("collected", flush=True)
    else:
        children.append(subprocess.Popen(["sh", "-c", line]))
sys.exit(4)
"""
WAITS = "trap 'exit 0' TERM; echo $$; while :; do sleep 0.05; done"
FAILS = "trap 'exit 3' TERM; echo $$; while :; do sleep 0.05; done"


class Shell:
    """Runs each line it is given in a shell; the line says its pid. A `Launch`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PARENT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def start(self, code: str) -> ProcessId:
        worker = identify(int(self._ask(code)))
        assert worker is not None
        return worker

    def collect(self) -> None:
        """Learn how the first worker ended, so that nobody else can."""
        self._ask("collect")

    def finish(self) -> None:
        """Let it end by itself, as torchrun does when a worker has failed."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()


@pytest.fixture
def shell() -> Iterator[Shell]:
    made = Shell()
    yield made
    made.close()


@pytest.fixture
def crew(shell: Shell) -> Iterator[Crew]:
    made = Crew(shell, nproc=2, stopped_s=2.0)
    yield made
    made.end()


def join(crew: Crew, shell: Shell, *codes: str) -> list[ProcessId]:
    workers = [shell.start(code) for code in codes]
    for rank, worker in enumerate(workers):
        crew.add(rank, worker.pid)
    return workers


def end(worker: ProcessId, number: int = signal.SIGTERM) -> None:
    os.kill(worker.pid, number)
    eventually(lambda: not is_alive(worker))


def test_a_crew_whose_workers_live_has_no_loss(crew: Crew, shell: Shell) -> None:
    join(crew, shell, WAITS, WAITS)

    assert crew.lives()
    assert crew.loss(0.0) is None
    assert len(crew.descriptors) == 3


def test_a_worker_that_ended_well_is_not_watched_any_more(crew: Crew, shell: Shell) -> None:
    first, _ = join(crew, shell, WAITS, WAITS)

    end(first)

    assert crew.loss(0.0) is None
    assert len(crew.descriptors) == 2
    assert not crew.lives()


def test_a_launch_is_over_when_all_workers_ended_well(crew: Crew, shell: Shell) -> None:
    for worker in join(crew, shell, WAITS, WAITS):
        end(worker)

    assert crew.loss(0.0) == Loss(0, "all workers exited with code 0")


def test_one_failure_is_the_end_of_a_launch(crew: Crew, shell: Shell) -> None:
    _, second = join(crew, shell, WAITS, FAILS)

    end(second)

    assert crew.loss(0.0) == Loss(3, "worker 1 exited with code 3", 1)


def test_a_worker_that_torchrun_collected_first_is_named_when_torchrun_ends(
    crew: Crew, shell: Shell
) -> None:
    first, _ = join(crew, shell, FAILS, WAITS)
    end(first)
    shell.collect()

    assert crew.loss(0.0) is None
    shell.finish()
    loss = eventually(lambda: crew.loss(0.0))
    assert loss == Loss(4, "worker 0 ended, torchrun exited with code 4", 0)


def test_a_stopped_worker_is_lost_after_a_while_unless_it_goes_on(crew: Crew, shell: Shell) -> None:
    first, _ = join(crew, shell, WAITS, WAITS)
    os.kill(first.pid, signal.SIGSTOP)
    eventually(lambda: not crew.lives())

    assert [crew.loss(now) for now in (10.0, 11.9)] == [None, None]
    os.kill(first.pid, signal.SIGCONT)
    eventually(crew.lives)
    assert crew.loss(13.0) is None
    os.kill(first.pid, signal.SIGSTOP)
    eventually(lambda: not crew.lives())
    assert crew.loss(14.0) is None
    assert crew.loss(16.0) == Loss(-signal.SIGSTOP, "worker 0 was stopped by a signal for 2 s", 0)


def test_ending_a_crew_ends_what_its_workers_started(crew: Crew, shell: Shell) -> None:
    workers = join(crew, shell, "sleep 1000 & echo $$; wait", WAITS)

    crew.end()

    assert not any(is_alive(worker) for worker in workers)
    assert crew.descriptors == []
    assert shell.poll() == -signal.SIGKILL


def test_a_signal_can_be_passed_on_to_one_worker_alone(crew: Crew, shell: Shell) -> None:
    join(crew, shell, FAILS, FAILS)

    crew.signal(signal.SIGTERM, only=1)

    loss = eventually(lambda: crew.loss(0.0))
    assert loss is not None
    assert loss.local_rank == 1


def test_before_any_worker_says_hello_signals_go_to_torchrun(crew: Crew, shell: Shell) -> None:
    crew.signal(signal.SIGUSR1)
    crew.signal(signal.SIGTERM)

    loss = eventually(lambda: crew.loss(0.0))
    assert loss == Loss(-signal.SIGTERM, "torchrun was ended by SIGTERM")
