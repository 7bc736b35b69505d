"""What a node runs: told to other jobs' standbys, and taken over from another job.

Two jobs run the same in the same surroundings if their workers get the same flags and environment,
but for what differs from node to node and from login to login, and for our own variables, which are
read again. Then the processes of a standby may run the other's script: what libraries have read of
the environment is right there, too.
"""

from __future__ import annotations

import os

from tmover import wire
from tmover.agent.launcher import WorkerCommand
from tmover.core.events import Joined
from tmover.environment import adopt, of_job
from tmover.errors import Refused


def describe(joined: Joined, command: WorkerCommand) -> wire.Program:
    """Return what this node runs."""
    return wire.Program(
        job=joined.job,
        agent=joined.agent,
        script=command.script,
        arguments=command.arguments,
        module=command.module,
        flags=command.flags,
        cwd=os.getcwd(),  # noqa: PTH109 - as it is named, links included
        env=of_job(os.environ),
    )


def is_alike(own: wire.Program, other: wire.Program) -> bool:
    """Return whether processes that were started for the one can run the other's script."""
    mine, theirs = (
        {name: value for name, value in each.env.items() if not name.startswith("TMOVER_")}
        for each in (own, other)
    )
    return (own.flags, mine) == (other.flags, theirs)


def take_over(other: wire.Program, nproc: int) -> WorkerCommand:
    """Be in the other's directory, with its environment; return what workers run from now on.

    Raises `Refused` if its directory is not there.
    """
    try:
        os.chdir(other.cwd)
    except OSError as error:
        msg = f"job {other.job} runs in {other.cwd}, which is not on this node: {error.strerror}"
        raise Refused(msg) from error
    adopt(other.job, other.env)
    return WorkerCommand(
        nproc=nproc,
        script=other.script,
        arguments=other.arguments,
        module=other.module,
        flags=other.flags,
    )
