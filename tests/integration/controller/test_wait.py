"""`tmover wait` as a batch script has it: silent, patient, and with the job's own exit code."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest

from support.scripted import Cast, wait_for
from tmover import wire
from tmover.cli.wait import Background, wait
from tmover.controller.client import ask
from tmover.core.events import Exited
from tmover.errors import ConfigError, ControllerUnavailable, TmoverError


class Waiting:
    """A `tmover wait` that runs."""

    def __init__(self, cast: Cast, *arguments: str, environ: Mapping[str, str] | None = None):
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TMOVER_"))}
        pythonpath = os.pathsep.join(sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tmover", "wait", *arguments, "--state", str(cast.state)],
            env=kept | {"PYTHONPATH": pythonpath} | dict(environ or {}),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def ended(self) -> bool:
        return self.process.poll() is not None

    def result(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=30)
        return self.process.returncode, output


@pytest.fixture
def waiting(own: Cast) -> Iterator[list[Waiting]]:
    """Those that were started; none is left."""
    started: list[Waiting] = []
    yield started
    for each in started:
        each.process.kill()
        each.process.communicate()


def test_it_ends_with_zero_once_training_is_done(own: Cast, waiting: list[Waiting]) -> None:
    job, agents = own.form(2)
    waiting.append(Waiting(own, job))

    for agent in agents:
        agent.finish()
    own.until(waiting[0].ended, "the end of `tmover wait`")

    assert waiting[0].result() == (0, "")


def test_a_signal_that_asks_the_job_for_a_checkpoint_does_not_end_it(
    own: Cast, waiting: list[Waiting]
) -> None:
    job, agents = own.form(2)
    waiting.append(Waiting(own, job))
    own.until(lambda: blocks(waiting[0].process.pid, signal.SIGUSR1), "that it has started")

    waiting[0].process.send_signal(signal.SIGUSR1)
    for agent in agents:
        agent.finish()
    own.until(waiting[0].ended, "the end of `tmover wait`")

    assert waiting[0].result() == (0, "")


def blocks(pid: int, number: int) -> bool:
    """Return whether the process has the signal blocked."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    mask = next(line for line in status.splitlines() if line.startswith("SigBlk:"))
    return bool(int(mask.split()[1], 16) >> (number - 1) & 1)


def test_it_ends_with_the_scripts_own_code(own: Cast, waiting: list[Waiting]) -> None:
    job, agents = own.form(1)
    waiting.append(Waiting(own, environ={"TMOVER_JOB": job}))

    for launch in (1, 2, 3):
        own.until(lambda n=launch: agents[0].launch >= n or _over(own, job), "a launch")  # type: ignore[misc]
        agents[0].say(Exited(job=job, agent=agents[0].name, launch=launch, code=7, reason="raised"))
    own.until(waiting[0].ended, "the end of `tmover wait`")

    assert waiting[0].result() == (7, "")


def test_a_standbys_script_ends_once_the_standby_is_let_go(
    own: Cast, waiting: list[Waiting]
) -> None:
    job, _ = own.form(1, standbys=1)
    role = {"TMOVER_JOB": job, "TMOVER_ROLE": "standby", "SLURMD_NODENAME": "node2"}
    before = _asked(own)
    waiting.append(Waiting(own, environ=role))
    own.until(lambda: _asked(own) > before, "its question")
    assert not waiting[0].ended()

    ask(own.state, wire.MoveRequest(job=job, node="node2", reason="maintenance"))
    own.until(waiting[0].ended, "the end of `tmover wait`")

    assert waiting[0].result() == (0, "")


def test_a_controller_that_is_started_again_is_waited_for(
    own: Cast, waiting: list[Waiting]
) -> None:
    job, _ = own.form(1)
    waiting.append(Waiting(own))

    own.restart()
    ask(own.state, wire.CancelRequest(job=job, reason="enough"))
    own.until(waiting[0].ended, "the end of `tmover wait`")

    assert waiting[0].result() == (130, "")


def test_a_controller_that_stays_away_is_not_waited_for_for_ever(
    own: Cast, waiting: list[Waiting]
) -> None:
    job, _ = own.form(1)
    own.controller.stop()
    waiting.append(Waiting(own, job, "--patience", "0"))

    code, output = waiting[0].result()

    assert code == 4
    assert output.startswith("error: no controller runs on ")
    assert output.count("\n") == 1


@pytest.mark.parametrize("error", [ControllerUnavailable("away"), ConfigError("unreadable")])
def test_a_job_whose_srun_runs_outlives_any_absence_of_the_controller(error: TmoverError) -> None:
    looks = 0
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as srun:

        def look() -> wire.JobStatus | None:
            nonlocal looks
            looks += 1
            if looks == 5:
                srun.communicate()
            raise error

        with pytest.raises(type(error)):
            wait(look, srun=Background(srun.pid), poll_s=0.001)

    assert looks == 6


def test_time_can_be_over(cast: Cast) -> None:
    job, _ = cast.form(1)

    assert Waiting(cast, job, "--timeout", "0").result() == (124, "")


def test_a_job_nobody_knows_is_one_clear_line(cast: Cast) -> None:
    in_slurm = {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "1", "TMOVER_AGENT_JOIN_S": "0.1"}

    code, output = Waiting(cast, environ=in_slurm).result()

    assert code == 2
    assert output.startswith("error: there is no job slurm17r1 here; `tmover status` lists ")
    assert output.count("\n") == 1


def test_an_srun_that_ended_before_any_node_joined_ends_it(cast: Cast) -> None:
    job = cast.submit(1, 1)
    with subprocess.Popen(["false"], stdout=subprocess.DEVNULL) as srun:
        code, output = Waiting(cast, job, "--srun", str(srun.pid)).result()

    assert (code, output) == (1, "")


def test_a_standby_is_not_over_before_its_srun_is(own: Cast, waiting: list[Waiting]) -> None:
    job, _ = own.form(1)
    role = {"TMOVER_JOB": job, "TMOVER_ROLE": "standby", "SLURMD_NODENAME": "node2"}
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as srun:
        before = _asked(own)
        waiting.append(Waiting(own, "--srun", str(srun.pid), environ=role))
        own.until(lambda: _asked(own) > before + 1, "its questions")
        assert not waiting[0].ended()

    own.until(waiting[0].ended, "the end of `tmover wait`")
    assert waiting[0].result() == (0, "")


def test_two_standbys_on_one_node_do_not_wait_for_each_other(
    own: Cast, waiting: list[Waiting]
) -> None:
    job, _ = own.form(1, standbys=1)
    role = {"TMOVER_JOB": job, "TMOVER_ROLE": "standby", "SLURMD_NODENAME": "node2"}
    killed, turned_away = subprocess.Popen(["cat"], stdin=-1), subprocess.Popen(["false"])
    with killed, turned_away:
        killed.kill()
        before = _asked(own)
        waiting.append(Waiting(own, "--srun", str(killed.pid), environ=role))
        own.until(lambda: _asked(own) > before + 1, "its questions")
        waiting.append(Waiting(own, "--srun", str(turned_away.pid), environ=role))
        own.until(waiting[1].ended, "the end of the one that was turned away")
        assert not waiting[0].ended(), "without its srun the job step may go on"

    assert waiting[1].result() == (0, "")


def test_sigterm_ends_it_at_once(own: Cast, waiting: list[Waiting]) -> None:
    job, _ = own.form(1)
    before = _asked(own)
    waiting.append(Waiting(own, job))
    process = waiting[0].process
    wait_for(lambda: _asked(own) > before, "its question", own.controller.why)

    process.send_signal(signal.SIGTERM)

    assert process.wait(timeout=10) == -signal.SIGTERM


def _asked(cast: Cast) -> int:
    """Return how often anybody has asked how jobs are."""
    return cast.controller.log.read_text().count("heard StatusRequest")


def _over(cast: Cast, job: str) -> bool:
    return cast.status(job).code is not None
