"""Where a lab lives: a number and a directory that no other run has, and its scripts."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from typing import NamedTuple

SCRIPTS = pathlib.Path(__file__).parents[2] / "slurm" / "lab"
_TOOLS = ("slurmctld", "slurmd", "scontrol", "munged")
MARK = "SLURM_LAB_DIR"
"""Stands in the environment of the daemons of a lab."""


class Place(NamedTuple):
    """What one lab has for itself: a number, the directory and the lock that go with it."""

    number: int
    directory: pathlib.Path
    lock: int


def can_isolate() -> str:
    """Return why nodes cannot be machines to each other here, "" if they can."""
    if os.geteuid() != 0:
        return "not root"
    probe = ["ip", "link", "add", "tmprobe", "type", "bridge"]
    try:
        made = subprocess.run(probe, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "no `ip`: apt-get install iproute2"
    if made.returncode == 0 or "exists" in made.stderr:
        subprocess.run(["ip", "link", "del", "tmprobe"], capture_output=True, check=False)
        return ""
    return f"no bridges: {made.stderr.strip()}"


def missing() -> list[str]:
    """Return which of Slurm's programs are not installed."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    return [tool for tool in _TOOLS if shutil.which(tool, path=path) is None]


def claim() -> Place:
    """Take a number that no other run has; clear away what killed runs have left."""
    base = pathlib.Path(tempfile.gettempdir())
    free: Place | None = None
    for offset in range(100):
        number = (os.getpid() + offset) % 100
        directory = base / f"tmover-lab-{os.getuid()}-{number}"
        if free is not None and not directory.exists():
            continue
        lock = _lock(base / f"{directory.name}.lock")
        if lock is None:
            continue
        place = Place(number, directory, lock)
        if directory.exists():
            take_down(place)
        if free is None and not pathlib.Path(f"/sys/class/net/tmbr{number}").exists():
            free = place
        else:
            os.close(lock)
    assert free is not None, "all 100 subnets for labs are taken"
    return free


def _lock(path: pathlib.Path) -> int | None:
    """Return a descriptor that holds the lock at `path`, None if somebody else does."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def take_down(place: Place) -> None:
    """Stop a lab, whichever kind it is and whoever started it."""
    isolated = (place.directory / "etc" / "hosts").exists()
    script(place, *(("netns.sh", "down") if isolated else ("down.sh", "-r")))
    shutil.rmtree(place.directory, ignore_errors=True)
    with contextlib.suppress(KeyError):
        pwd.getpwnam(f"tmlab{place.number}")
        system("userdel", f"tmlab{place.number}")


def script(place: Place, name: str, *argv: str) -> str:
    env = os.environ | {MARK: str(place.directory), "SLURM_LAB_ID": str(place.number)}
    return system(str(SCRIPTS / name), *argv, env=env)


def system(*argv: str, env: Mapping[str, str] | None = None) -> str:
    ended = subprocess.run(
        argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, f"{argv}: {ended.stderr or ended.stdout}"
    return ended.stdout
