"""Runs one of Slurm's commands: with a deadline, in plain English, as whoever it is for."""

from __future__ import annotations

import contextlib
import os
import pathlib
import pwd
import selectors
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tmover.errors import SchedulerError

PINNED = {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}
"""What makes the output of a command the same for everybody; times are seconds since 1970."""

STDIN = "/dev/stdin"
"""What a command is to read if it wants a file, and is given `Command.stdin`."""
_OVERRIDES = ("SLURM_", "SQUEUE_", "SINFO_", "SCANCEL_", "SCONTROL_", "SACCT_")
"""Variables that change what commands do; a job's own lead astray whoever asks about others."""
MOST_BYTES = 64 * 1024 * 1024
"""What a command may write; the whole queue of a large cluster is less."""
_GRACE_S = 1.0
"""How long a command may take to end by itself at its deadline."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """A command to run."""

    argv: tuple[str, ...]
    env: Mapping[str, str] | None = None
    """All of its environment; None for this process's, without what is Slurm's or a user's."""
    cwd: str | None = None
    stdin: str = ""
    user: str | None = None
    """Who it runs as, None for this process's user. Only root can name another."""
    timeout_s: float = 30.0

    def __str__(self) -> str:
        """Return the line to paste into a shell."""
        return shlex.join(self.argv)


class Completed(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended."""

    code: int
    out: str = ""
    err: str = ""
    timed_out: bool = False
    """It was killed at its deadline; it may have done its work before that."""


Run = Callable[[Command], Completed]


def run_command(command: Command) -> Completed:
    """Run a command; what is no UTF-8 in its output is replaced.

    Raises `SchedulerError` if it cannot be started.
    """
    identity = _identity(command.user)
    argv, cwd = command.argv, command.cwd
    if identity is not None:  # who may be let in where root is not, as in a home on NFS
        argv, cwd = (("env", f"--chdir={cwd}", *argv) if cwd else argv), "/"
    given = _open_text(command.stdin)
    try:
        process = subprocess.Popen(
            argv,
            env=_environment(command, os.environ, identity),
            cwd=cwd,
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            **_become(identity),
        )
    except OSError as error:
        what = "is it installed, and on the PATH?" if isinstance(error, FileNotFoundError) else ""
        reason = (error.strerror or str(error)).lower()
        msg = f"cannot run {command.argv[0]}: {error.filename or ''} {reason}; {what}".rstrip("; ")
        raise SchedulerError(msg) from error
    finally:
        os.close(given)
    return _finish(process, command)


def _open_text(text: str) -> int:
    """Return a descriptor to read the text from. Whoever has it can also open it as `STDIN`."""
    if not text:
        return os.open(os.devnull, os.O_RDONLY)
    fd = os.memfd_create("stdin")
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(text.encode())
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _finish(process: subprocess.Popen[bytes], command: Command) -> Completed:
    """Wait for the end; at the deadline, end the command and everything it started."""
    assert process.stdout is not None and process.stderr is not None  # noqa: S101, PT018 - pipes
    with process.stdout as out, process.stderr as err:
        try:
            said = _hear(process, (out.fileno(), err.fileno()), command)
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGTERM)  # salloc takes its request back
            _collect(process)
            _signal(process, signal.SIGKILL)
            _collect(process)  # what hangs in the kernel is not waited for
            return Completed(code=-signal.SIGKILL, timed_out=True)
        except BaseException:
            _signal(process, signal.SIGKILL)
            _collect(process)
            raise
    text = [part.decode(errors="replace") for part in said]
    return Completed(code=process.returncode, out=text[0], err=text[1])


def _hear(
    process: subprocess.Popen[bytes], pipes: tuple[int, int], command: Command
) -> list[bytearray]:
    """Return what the command writes until its end: to stdout, and to stderr.

    Raises `TimeoutExpired` at its deadline, `SchedulerError` if it does not stop writing: what a
    user put in its way (PATH, LD_PRELOAD) must not fill the memory of the cluster's controller.
    """
    deadline = time.monotonic() + command.timeout_s
    said = {fd: bytearray() for fd in pipes}
    with selectors.DefaultSelector() as selector:
        for fd in pipes:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready or time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(command.argv, command.timeout_s)
            for key, _ in ready:
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fd)
                said[key.fd] += data
            if sum(map(len, said.values())) > MOST_BYTES:
                msg = f"{command.argv[0]} wrote more than {MOST_BYTES} bytes, and was ended"
                raise SchedulerError(msg)
    process.wait(max(0.0, deadline - time.monotonic()))
    return list(said.values())


def _collect(process: subprocess.Popen[bytes]) -> None:
    """Wait a moment for the end of the command."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Signal the command and what it started; its group has its pid, collected or not."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def scrubbed(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what an enclosing job or a user's taste put in for Slurm.

    Which cluster it is (SLURM_CONF) stays, and so do a user's defaults for new jobs (SBATCH_*).
    """
    return {
        name: value
        for name, value in environ.items()
        if name == "SLURM_CONF" or not name.startswith(_OVERRIDES)
    }


def _identity(user: str | None) -> pwd.struct_passwd | None:
    """Return whom to become, None if that is who this process is. Raises `SchedulerError`."""
    if user is None:
        return None
    try:
        found = pwd.getpwnam(user)
    except KeyError:
        msg = f"there is no user {user} on this machine"
        raise SchedulerError(msg) from None
    if found.pw_uid == os.geteuid():
        return None
    if os.geteuid() != 0:
        msg = f"only root can run commands as {user}; start the controller as {user}, or as root"
        raise SchedulerError(msg)
    return found


def _become(identity: pwd.struct_passwd | None) -> dict[str, Any]:
    if identity is None:
        return {}
    groups = os.getgrouplist(identity.pw_name, identity.pw_gid)
    return {"user": identity.pw_uid, "group": identity.pw_gid, "extra_groups": groups}


def _environment(
    command: Command, environ: Mapping[str, str], identity: pwd.struct_passwd | None
) -> dict[str, str]:
    """Return the environment; another user gets nothing of this process's but PATH and cluster."""
    if command.env is not None:
        env = dict(command.env)
    elif identity is None:
        env = scrubbed(environ) | PINNED
    else:
        env = dict(PINNED)
    if "SLURM_CONF" in environ:
        env.setdefault("SLURM_CONF", environ["SLURM_CONF"])
    env.setdefault("PATH", environ.get("PATH", _PATH))
    if identity is not None:
        home = identity.pw_dir if pathlib.PurePath(identity.pw_dir).is_absolute() else "/"
        name, shell = identity.pw_name, identity.pw_shell or "/bin/sh"
        env |= {"HOME": home, "USER": name, "LOGNAME": name, "SHELL": shell}
    return env
