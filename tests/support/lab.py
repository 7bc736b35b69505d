"""A throw-away Slurm for the tests: real daemons, nodes that can be switched off, cut and frozen.

As root every node is a machine to the others (namespaces of its own); for anyone else all nodes
share this machine, and what takes a node away is skipped.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import pwd
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeVar

import pytest

from support.place import MARK, Place, script, system, take_down
from support.sharing import share
from tmover.process import ProcessId, descendants, marked

T = TypeVar("T")

_RESET_S = 150.0
_BUSY = 3
"""How much longer everything may take on a busy one."""
_GRACE_S = 4.0
"""How long processes of cancelled jobs may take to end (KillWait is 3 s)."""
_END_S = 1.0
"""How long slurmstepd may take to end when Slurm knows no job any more."""
_running: set[pathlib.Path] = set()


class Job(NamedTuple):
    """A line of squeue."""

    id: str
    state: str
    nodes: str
    name: str


class Lab:
    """One running cluster of six nodes: node1 to node6, the last two also in partition standby."""

    def __init__(self, place: Place, *, isolated: bool, size: int = 6) -> None:
        self.directory = place.directory
        self.scratch = place.directory / "scratch"
        """Where commands run, and so where the output of jobs goes. Anyone can write there."""
        self.bin = place.directory / "bin"
        """Has `tmover` and `python`, and stands first in PATH. `add_user` makes them anyone's."""
        self.nodes = tuple(f"node{k}" for k in range(1, size + 1))
        self.isolated = isolated
        """Whether nodes are machines to each other."""
        self.address = f"10.213.{place.number}.1" if isolated else "127.0.0.1"
        """Where this machine is reached from the nodes."""
        self.user = f"tmlab{place.number}"
        """A user who is not root, once `add_user` has made it."""
        self._place = place
        self._conf = ""

    @property
    def conf(self) -> pathlib.Path:
        """The lab's slurm.conf."""
        return self.directory / "etc" / "slurm.conf"

    @property
    def env(self) -> dict[str, str]:
        """Return the environment in which Slurm's commands speak to this cluster."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        path = os.pathsep.join([str(self.bin), kept.get("PATH", ""), "/usr/sbin", "/sbin"])
        return kept | {"SLURM_CONF": str(self.conf), "PATH": path, "LC_ALL": "C.UTF-8"}

    def run(
        self,
        *argv: str | pathlib.Path,
        user: str | None = None,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        cwd: pathlib.Path | None = None,
        timeout_s: float = 60.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command, by default in `scratch` and as root; fail with its words if it fails."""
        environ = self.env | dict(env or {})
        entry = None if user is None else pwd.getpwnam(user)
        if entry is not None:
            environ |= {"HOME": entry.pw_dir, "USER": entry.pw_name, "LOGNAME": entry.pw_name}
        ended = subprocess.run(
            [str(word) for word in argv],
            env=environ,
            cwd=cwd or self.scratch,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            user=entry and entry.pw_uid,
            group=entry and entry.pw_gid,
            extra_groups=None if entry is None else [],
        )
        assert not check or ended.returncode == 0, f"{argv}: {ended.stderr or ended.stdout}"
        return ended

    # -- what Slurm says

    def squeue(self) -> list[Job]:
        """Return the jobs that are not over."""
        lines = self.run("squeue", "-h", "-r", "-o", "%A|%T|%N|%j").stdout.splitlines()
        return [Job(*line.split("|", 3)) for line in lines]

    def states(self) -> dict[str, str]:
        """Return each node's state with all its flags, such as `idle+drain`."""
        lines = self.run(
            "sinfo", "-h", "-p", "main", "-N", "-O", "NodeList:|,StateComplete:"
        ).stdout
        pairs = (line.split("|", 1) for line in lines.splitlines())
        return {name.strip(): state.strip() for name, state in pairs}

    def wait(self, predicate: Callable[[], T], timeout_s: float, what: str) -> T:
        """Return what `predicate` returns once that is true; fail saying what Slurm says then.

        `timeout_s` is ample on a machine that does nothing else.
        """
        deadline = time.monotonic() + _BUSY * timeout_s
        while not (seen := predicate()):
            if time.monotonic() > deadline:
                said = (
                    self.run("squeue", check=False).stdout
                    + self.run("sinfo", "-N", check=False).stdout
                )
                pytest.fail(f"not within {_BUSY * timeout_s:g} s: {what}; saw {seen!r}\n{said}")
            time.sleep(0.05)
        return seen

    # -- what happens to nodes

    def require_machines(self) -> None:
        """Skip the test where nodes are not machines to each other."""
        if not self.isolated:
            pytest.skip("nodes are machines of their own only for root")

    def power_off(self, *nodes: str) -> None:
        """Switch nodes off: nothing of theirs runs any more, and nobody is told."""
        self._netns("off", *nodes)

    def boot(self, *nodes: str) -> None:
        """Switch nodes on that are off; slurmd starts."""
        self._netns("boot", *nodes)

    def cut(self, *nodes: str) -> None:
        """Pull the network cables of nodes; their processes go on."""
        self._netns("cut", *nodes)

    def heal(self, *nodes: str) -> None:
        """Plug the cables in again."""
        self._netns("heal", *nodes)

    def hang(self, *nodes: str) -> None:
        """Freeze all processes of nodes."""
        self._netns("hang", *nodes)

    def thaw(self, *nodes: str) -> None:
        """Let frozen nodes go on."""
        self._netns("thaw", *nodes)

    def kill_slurmd(self, *nodes: str) -> None:
        """Kill slurmd alone: the tasks of jobs go on."""
        self._netns("kill-slurmd", *nodes)

    def start_slurmd(self, *nodes: str) -> None:
        """Start slurmd on nodes where it was killed."""
        self._netns("start-slurmd", *nodes)

    def on(self, node: str, *argv: str) -> str:
        """Run a command inside `node` and return what it prints."""
        return self._netns("exec", node, *argv)

    def strays(self, node: str) -> dict[int, str]:
        """Return what runs on `node` but Slurm's daemon, by pid, in words. Empty between jobs."""
        self.require_machines()
        found = ((pid, _command_line(pid)) for pid in self._members(node))
        return {pid: line for pid, line in found if line and not _is_of_the_node(line)}

    # -- slurmctld

    def stop_slurmctld(self, *, kill: bool = False) -> None:
        """End slurmctld; with `kill` it cannot save its state first."""
        self._script("controller.sh", "kill" if kill else "stop")

    def start_slurmctld(self) -> None:
        """Start slurmctld, with the state it saved, and wait until it answers."""
        self._script("controller.sh", "start")
        self.wait(lambda: self.run("scontrol", "ping", check=False).returncode == 0, 20, "a ping")

    def restart_slurmctld(self) -> None:
        """Stop slurmctld and start it again."""
        self.stop_slurmctld()
        self.start_slurmctld()

    @contextlib.contextmanager
    def configured(self, *lines: str) -> Iterator[None]:
        """Have more lines in slurm.conf within a `with` block."""
        self.conf.write_text(self._conf + "\n".join(lines) + "\n")
        self.run("scontrol", "reconfigure")
        try:
            yield
        finally:
            self._restore_conf()

    def reserve(self, name: str, nodes: str, *, start: str = "now", minutes: int = 60) -> None:
        """Make a reservation for maintenance; `start` in scontrol's words, such as now+90."""
        self.run(
            *("scontrol", "create", "reservation", f"ReservationName={name}", "Users=root"),
            *(f"Nodes={nodes}", f"StartTime={start}", f"Duration={minutes}"),
            "Flags=MAINT,IGNORE_JOBS",
        )

    # -- from start to end

    def start(self) -> None:
        """Start the cluster and wait until all nodes are idle."""
        _running.add(self.directory)
        self._script(
            *(("netns.sh", "up") if self.isolated else ("up.sh", "-n")), str(len(self.nodes))
        )
        self.scratch.mkdir()
        self.scratch.chmod(0o1777)
        share(self.directory, everyone=False)
        self._conf = self.conf.read_text()

    def add_user(self) -> str:
        """Make the user who is not root, with a home in the lab, and return its name."""
        if os.geteuid() != 0:
            pytest.skip("only root can run jobs as another user")
        home = self.directory / "home"
        system("useradd", "--no-create-home", "--home-dir", str(home), "-s", "/bin/bash", self.user)
        home.mkdir(mode=0o755)
        shutil.chown(home, self.user, self.user)
        share(self.directory, everyone=True)
        return self.user

    def reset(self) -> None:
        """Leave nothing of a test: no job, no reservation, no drain, no process on any node."""
        if self.isolated:
            self.thaw(*self.nodes)
            self.heal(*self.nodes)
        self.start_slurmctld()
        self._restore_conf()
        self._cancel_everything()
        started, cycled = time.monotonic(), False
        while not self._is_pristine():
            late = time.monotonic() - started
            assert late < _RESET_S, f"not clean: {self.squeue()}, {self.states()}"
            is_left = late > (_GRACE_S if self.squeue() else _END_S)
            if self.isolated and not cycled and (is_left or self._off()):
                self._cycle()
                cycled = True
            self._resume_all()
            time.sleep(0.1)
        for left in self.scratch.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()

    def close(self) -> None:
        """Stop everything and remove it."""
        take_down(self._place)
        _running.discard(self.directory)

    def _cancel_everything(self) -> None:
        if jobs := {job.id for job in self.squeue()}:
            self.run("scancel", *jobs, check=False)
        shown = self.run("scontrol", "-o", "show", "reservation").stdout
        for line in shown.splitlines():
            if line.startswith("ReservationName="):
                name = line.split()[0].partition("=")[2]
                self.run("scontrol", "delete", f"ReservationName={name}", check=False)

    def _is_pristine(self) -> bool:
        if self.squeue() or set(self.states().values()) != {"idle"}:
            return False
        if not self.isolated:
            return True
        return not self._off() and not any(self.strays(node) for node in self.nodes)

    def _off(self) -> list[str]:
        """Return the nodes that are off or have no slurmd."""
        running = {n: [_command_line(pid) for pid in self._members(n)] for n in self.nodes}
        return [node for node, lines in running.items() if not any(map(_is_slurmd, lines))]

    def _members(self, node: str) -> list[int]:
        """Return what runs in the node's PID namespace."""
        try:
            init = int((self.directory / "run" / f"init.{node}").read_text())
            space = pathlib.Path(f"/proc/{init}/ns/pid").readlink()
        except OSError:
            return []
        found = []
        for link in pathlib.Path("/proc").glob("[0-9]*/ns/pid"):
            with contextlib.suppress(OSError):
                if link.readlink() == space:
                    found.append(int(link.parts[2]))
        return found

    def _cycle(self) -> None:
        """Switch off and on again what is off, and what still runs something."""
        states = self.states()
        bad = {*self._off(), *(node for node in self.nodes if self.strays(node))}
        bad |= {node for node, state in states.items() if "not_responding" in state}
        if bad:
            self.power_off(*sorted(bad))
            self.boot(*sorted(bad))

    def _resume_all(self) -> None:
        for node, state in self.states().items():
            if "reboot" in state:
                self.run("scontrol", "cancel_reboot", node, check=False)
            if state not in ("idle", "completing", "idle+completing") and "alloc" not in state:
                self.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)

    def _restore_conf(self) -> None:
        if self.conf.read_text() != self._conf:
            self.conf.write_text(self._conf)
            self.run("scontrol", "reconfigure")

    def _netns(self, *argv: str) -> str:
        self.require_machines()
        return self._script("netns.sh", *argv)

    def _script(self, name: str, *argv: str) -> str:
        return script(self._place, name, *argv)


def daemons() -> set[ProcessId]:
    """Return the processes of running labs, and all below them: they outlive a test."""
    roots = [p.pid for place in _running for p in marked(MARK, str(place))]
    return descendants(*roots) if roots else set()


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return (
            pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        )
    return ""


def _is_of_the_node(line: str) -> bool:
    """Return whether this is slurmd, the node's PID 1, or what that waits for."""
    return _is_slurmd(line) or line == "sleep 86400" or 'slurmd -N "$0"' in line


def _is_slurmd(line: str) -> bool:
    return line.startswith(("slurmd -N", "slurmd -b"))
