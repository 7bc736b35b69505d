"""Jobs on a real Slurm, submitted as a user submits them."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from support.lab import Lab
from support.training import Kind, Outcome, judge, read_trace
from tmover import wire
from tmover.controller.client import ask, read_address
from tmover.errors import ControllerUnavailable
from tmover.process import identify, send_signal, wait_gone

ROOT = pathlib.Path(__file__).parents[2]
KIND = Kind(nodes=4, steps=60)
HELD = 20
"""The step after which rank 0 holds until a test has seen to everything."""
PATIENCE_S = 240.0


def weigh(trace: pathlib.Path, status: wire.JobStatus) -> Outcome:
    """Return what is left of a run of the example.

    Its weights are compared, not each rank's own records: it leaves Python's generator unseeded.
    """
    outcome = judge(read_trace(trace), status, KIND.steps)
    finals = {rank: (digest, "") for rank, (digest, _) in outcome.finals.items()}
    return dataclasses.replace(outcome, finals=finals)


class Cluster:
    """What a user has on the lab: a state directory, a working directory, and `tmover`."""

    def __init__(self, lab: Lab, *, user: str | None = None) -> None:
        self.lab = lab
        self.user = user
        self.home = lab.scratch / (user or "work")
        self.state = self.home / "state"
        self.trace = self.home / "trace"
        for directory in (self.home, self.state):
            directory.mkdir(mode=0o700)
        (self.home / "examples").symlink_to(ROOT / "examples")
        self.env = lab.env | {
            "PATH": f"{pathlib.Path(sys.executable).parent}{os.pathsep}{lab.env['PATH']}",
            "TMOVER_STATE": str(self.state),
            "TMOVER_TRACE": str(self.trace),
            "TMOVER_SLURM_POLL_S": "1",
            "TMOVER_SLURM_END_S": "25",
            "OMP_NUM_THREADS": "1",
        }
        self._started: list[subprocess.Popen[bytes]] = []
        self.hold_at(HELD)

    def hold_at(self, *steps: int, later: int = 0) -> None:
        """Have rank 0 hold after the first of these steps, and rank `later` after the others.

        This is for jobs submitted from now on. Who joins as a rank does not hold.
        """
        self.env["TMOVER_INJECT"] = ";".join(
            f"hold:rank={later if place else 0},step={step},point=after_body,"
            f"until={self.gate(step)}"
            for place, step in enumerate(steps)
        )

    def gate(self, step: int) -> pathlib.Path:
        """Return the file that ends a hold."""
        return self.home / f"gate{step}"

    def tmover(
        self, *argv: str, check: bool = True, timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of ours; fail with its words if it fails."""
        ended = subprocess.run(
            ["tmover", *argv],
            env=self.env,
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert not check or ended.returncode == 0, f"{argv}: {ended.stdout}{ended.stderr}"
        return ended

    def submit(
        self,
        *options: str,
        nodes: int = KIND.nodes,
        standby: int = 1,
        arguments: tuple[str, ...] = ("--steps", str(KIND.steps)),
    ) -> Job:
        """Submit the example."""
        said = self.tmover(
            "submit",
            "examples/train_gpt.sbatch",
            *("--nodes", str(nodes), "--standby", str(standby)),
            *options,
            "--",
            *arguments,
        ).stdout
        found = re.search(r"job ([0-9]+)", said)
        assert found, said
        return Job(self, found[1])

    def knows(self, job: str) -> bool:
        """Return whether the controller looks after a job."""
        reply = ask(self.state, wire.StatusRequest(), 10.0)
        assert isinstance(reply, wire.StatusReply)
        return job in {one.job for one in reply.jobs}

    def controller(self) -> int | None:
        """Return the controller's pid."""
        try:
            return read_address(self.state).pid
        except ControllerUnavailable:
            return None

    def kill_controller(self) -> None:
        """Kill the controller as a crash would."""
        pid = self.controller()
        process = None if pid is None else identify(pid)
        assert process is not None
        send_signal(process, signal.SIGKILL)
        assert not wait_gone([process], timeout_s=10)

    def start_controller(self) -> None:
        """Start a controller by hand, as a user does after a crash."""
        with (self.home / "controller.log").open("ab") as log:
            started = subprocess.Popen(
                ["tmover", "--log-level", "INFO", "controller", "--bind", "tcp://0.0.0.0:0"],
                env=self.env,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._started.append(started)

    def close(self) -> None:
        """End the controller."""
        pid = self.controller()
        process = None if pid is None else identify(pid)
        if process is not None:
            send_signal(process, signal.SIGTERM)
            if wait_gone([process], timeout_s=10):
                send_signal(process, signal.SIGKILL)
        for started in self._started:
            started.wait()


class Job:
    """One job of ours on Slurm."""

    def __init__(self, cluster: Cluster, id_: str) -> None:
        self.cluster = cluster
        self.id = id_

    def status(self) -> wire.JobStatus:
        """Return how it is. Raises `ControllerUnavailable`."""
        reply = ask(self.cluster.state, wire.StatusRequest(job=self.id), 10.0)
        assert isinstance(reply, wire.StatusReply)
        return reply.jobs[0]

    def until(
        self, due: Callable[[wire.JobStatus], bool], what: str, *, timeout_s: float = PATIENCE_S
    ) -> wire.JobStatus:
        """Wait until the status is as wanted; fail with everything there is to see."""
        deadline = time.monotonic() + timeout_s
        seen: object = None
        while time.monotonic() < deadline:
            try:
                seen = status = self.status()
            except ControllerUnavailable as error:
                seen = error
            else:
                if due(status):
                    return status
                assert status.code is None, f"ended before {what}: {status}\n{self.logs()}"
            time.sleep(0.1)
        msg = f"not within {timeout_s:g} s: {what}; saw {seen}\n{self.logs()}"
        raise AssertionError(msg)

    def until_held(self) -> wire.JobStatus:
        """Wait until all train, a standby is warm, and rank 0 holds."""
        return self.until(
            lambda status: status.step == HELD and self._is_warm(status),
            f"step {HELD} and a warm standby",
        )

    @staticmethod
    def _is_warm(status: wire.JobStatus) -> bool:
        return any(standby.state == "warm" for standby in status.standbys)

    def go_on(self, step: int = HELD) -> None:
        """Let rank 0 go on from where it holds."""
        self.cluster.gate(step).touch()

    def until_armed(self) -> None:
        """Wait until a planned move has only to be gone through."""
        self.until(lambda status: status.phase == "armed", "all are prepared for the move")

    def until_lost(self, node: str) -> None:
        """Wait until a node is given up."""
        self.until(
            lambda status: any(f" {node} is lost: " in note for note in status.notes),
            f"the loss of {node}",
        )

    def node(self, slot: int) -> str:
        """Return the node that holds a slot now."""
        return self.status().slots[slot].node

    def finish(self) -> Outcome:
        """Wait for the end of training, and of everything that Slurm holds for it."""
        status = self.until(lambda status: status.code is not None, "the end")
        self.cluster.lab.wait(lambda: not self.cluster.lab.squeue(), 60, "an empty squeue")
        return weigh(self.cluster.trace, status)

    def logs(self) -> str:
        """Return the ends of all logs."""
        homes = (self.cluster.home, self.cluster.state, self.cluster.state / "logs")
        paths = sorted(path for home in homes if home.exists() for path in home.glob("*.log"))
        texts = [f"--- {path.name}\n{path.read_text(errors='replace')[-6000:]}" for path in paths]
        return "\n".join(texts) + "\n" + self.cluster.lab.run("squeue", check=False).stdout
