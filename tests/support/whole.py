"""A lab with a controller for all its users, under root."""

from __future__ import annotations

import pathlib
import pwd
import re
import shutil
import subprocess

from support.lab import Lab
from support.slurmjobs import HELD, ROOT, Cluster
from tmover.controller.starter import Starter

STARTS_S = 30.0
UNIT = ROOT / "conf" / "tmover.service"


def _capabilities() -> str:
    """Return the capabilities that the unit leaves to the controller, as setpriv reads them."""
    (line,) = re.findall("^CapabilityBoundingSet=(.*)$", UNIT.read_text(), re.MULTILINE)
    names = [name.removeprefix("CAP_").lower() for name in line.split()]
    return ",".join(["-all", *(f"+{name}" for name in names)])


class Site:
    """What root has: the state directory, the configuration of all machines, the controller."""

    def __init__(self, lab: Lab, *, users: tuple[str, ...]) -> None:
        self.lab = lab
        self.users = users
        self.state = lab.scratch / "cluster"
        self.config = lab.scratch / "tmover.toml"
        self.config.write_text(f'[controller]\nstate = "{self.state}"\n')
        self.log = lab.scratch / "controller.log"
        self._started: list[subprocess.Popen[bytes]] = []

    @property
    def everywhere(self) -> dict[str, str]:
        """Return what tells all commands, also root's, of the controller."""
        return {"TMOVER_CONFIG": str(self.config)}

    @property
    def env(self) -> dict[str, str]:
        """Return what the controller is started with."""
        return {
            "TMOVER_CONTROLLER_USERS": ",".join(self.users),
            "TMOVER_SLURM_POLL_S": "1",
            "TMOVER_SLURM_END_S": "10",
        }

    def argv(self, *, bind: str = "") -> list[str]:
        """Return how the controller is started: with no more rights than the unit leaves it."""
        address = bind or f"tcp://{self.lab.address}:0"
        return [
            *("setpriv", "--no-new-privs", "--bounding-set", _capabilities()),
            *("tmover", "--log-level", "INFO", "controller"),
            *("--state", str(self.state), "--bind", address),
        ]

    def start_controller(self, *, bind: str = "") -> None:
        """Start the controller and wait until it can be found."""
        with self.log.open("ab") as log:
            started = subprocess.Popen(
                self.argv(bind=bind),
                env=self.lab.env | self.env,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._started.append(started)
        starter = Starter(self.state)
        self.lab.wait(
            lambda: (found := starter.running()) is not None and found.pid == started.pid,
            STARTS_S,
            f"a controller: {self.log.read_text()}",
        )

    def end_controller(self, *, kill: bool = False) -> None:
        """End it, or kill it as a crash would."""
        last = self._started.pop()
        last.kill() if kill else last.terminate()
        last.wait(timeout=20)

    def close(self) -> None:
        """End the controller."""
        while self._started:
            self.end_controller()

    def place(self, user: str) -> pathlib.Path:
        """Return what is a user's state directory."""
        return self.state / "users" / user

    def owners(self) -> list[str]:
        """Return whose the jobs are that are not over, one by one."""
        return self.lab.run("squeue", "-h", "-o", "%u").stdout.split()


class User(Cluster):
    """What a user has who is served: a working directory, and `tmover`; nothing to set up."""

    def __init__(self, site: Site, name: str) -> None:
        super().__init__(site.lab, user=name)
        self.state = site.place(name)
        self.env = site.lab.env | {
            **site.everywhere,
            "TMOVER_TRACE": str(self.trace),
            "OMP_NUM_THREADS": "1",
        }
        self.hold_at(HELD)
        (self.home / "examples").unlink()
        shutil.copytree(ROOT / "examples", self.home / "examples")
        entry = pwd.getpwnam(name)
        for path in (self.home, *self.home.rglob("*")):
            shutil.chown(path, entry.pw_uid, entry.pw_gid)

    def tmover(
        self, *argv: str, check: bool = True, timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of ours as the user."""
        return self.lab.run(
            *("tmover", *argv),
            user=self.user, cwd=self.home, env=self.env, check=check, timeout_s=timeout_s,
        )  # fmt: skip
