"""The process at the root of a node of the local scheduler, as slurmstepd is of a job step.

It starts one command, passes signals on to it, adopts what the command's processes leave behind,
kills that when the command has ended, and writes how it ended. Standard library only, no threads. A
holder that is killed takes the command with it.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys
from collections.abc import Callable
from typing import Any

from tmover.process import adopt_orphans, descendants, die_with_parent, send_signal

_PASSED_ON = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)

Run = Callable[[dict[str, Any]], int]
"""Becomes the command in the child; returns its exit code if it does not replace the process."""


def main() -> None:
    """Hold the job step that the file in the first argument describes."""
    hold(pathlib.Path(sys.argv[1]), run=execute)


def hold(path: pathlib.Path, *, run: Run) -> None:
    """Start the command, wait for its end, end what it left, write the status."""
    step: dict[str, Any] = json.loads(path.read_text())
    os.chdir("/")
    adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_PASSED_ON, signal.SIGCHLD})
    command = _start(step, run)
    status = _wait_for(command)
    _end_leftovers()
    write_status(path, os.waitstatus_to_exitcode(status))


def execute(step: dict[str, Any]) -> int:
    """Replace this process by the command."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and exec would pass that on
    try:
        os.chdir(step["cwd"])
        os.execvpe(step["argv"][0], step["argv"], step["env"])  # noqa: S606 - no shell is wanted
    except OSError as error:
        sys.stderr.write(f"error: cannot run {step['argv'][0]} in {step['cwd']}: {error}\n")
        return 127


def write_status(step: pathlib.Path, code: int, reason: str = "") -> None:
    """Say how the job step ended: the file appears whole, or not at all."""
    new = step.with_name(f".status.{os.getpid()}")
    new.write_text(json.dumps({"code": code, "reason": reason}))
    new.replace(step.with_name("status.json"))


def _start(step: dict[str, Any], run: Run) -> int:
    holder = os.getpid()
    command = os.fork()
    if command:
        return command
    code = 1
    try:
        die_with_parent(holder)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        code = run(step)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait_for(command: int) -> int:
    """Pass signals on until `command` has ended; return its wait status."""
    while True:
        number = signal.sigwait({*_PASSED_ON, signal.SIGCHLD})
        if number != signal.SIGCHLD:
            os.kill(command, number)  # not reaped yet, so the pid is still its own
            continue
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == command:
                return status
            if pid == 0:
                break


def _end_leftovers() -> None:
    """Kill every process below this one, and collect them all."""
    while True:
        for process in descendants(os.getpid()):
            if process.pid != os.getpid():
                send_signal(process, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


if __name__ == "__main__":
    main()
