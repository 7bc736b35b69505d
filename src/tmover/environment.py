"""What a scheduler tells an agent, and an agent its workers, in variables of their environment."""

from __future__ import annotations

import os
import pathlib
import re
import socket
from collections.abc import Mapping

import msgspec

from tmover.config import slurm_job, state_directory
from tmover.errors import ConfigError

_OWN = re.compile(
    r"SLURM.*|SBATCH.*|SRUN.*|PMI.*|CUDA_VISIBLE_DEVICES|ROCR_VISIBLE_DEVICES|GPU_.*|ZE_.*"
    r"|HOSTNAME|HOST|TMPDIR|_|PWD|OLDPWD|SHLVL|TERM.*|COLUMNS|LINES|WINDOWID|DISPLAY|LS_COLORS"
    r"|SSH_.*|XDG_.*|DBUS_.*|TMUX.*|STY|INVOCATION_ID|JOURNAL_STREAM|KRB5CCNAME|LESS.*|MAIL"
    r"|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_.*|TORCHELASTIC_.*"
    r"|TMOVER_(STATE|JOB|NODE|ADDRESS|ROLE|SLOT|AGENT|AGENT_PID|PARENT_PID)"
)
"""Variables that are a node's, an allocation's, a login's or a worker's own."""


def of_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what of an environment is the job's.

    >>> of_job({"SLURM_JOB_ID": "7", "OMP_NUM_THREADS": "1", "TMOVER_JOB": "2"})
    {'OMP_NUM_THREADS': '1'}
    """
    return {name: value for name, value in environ.items() if not _OWN.fullmatch(name)}


def adopt(job: str, env: Mapping[str, str]) -> None:
    """Have the environment of another job in this process; what is its own stays."""
    for name in of_job(os.environ).keys() - env.keys():
        del os.environ[name]
    os.environ.update(env, TMOVER_JOB=job)


def own_job(environ: Mapping[str, str]) -> str | None:
    """Return our name of the job that a process is of, None if it is of none."""
    number = _number(environ, "SLURM_JOB_ID")
    if environ.get("TMOVER_JOB") or number is None:
        return _name(environ, "TMOVER_JOB") or None
    return slurm_job(number, _number(environ, "SLURM_RESTART_COUNT") or 0)


class AgentEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler tells an agent. No secret is among it."""

    state: pathlib.Path
    """Where the controller's address and the client's key are found."""
    job: str
    node: str
    address: str
    """Where the workers of this node listen; "" means the address that routes to the controller."""
    standby: bool
    slot: int | None

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> AgentEnvironment:
        """Read it. Raises `ConfigError` naming the variable and what to do."""
        environ = os.environ if environ is None else environ
        job = own_job(environ)
        if job is None:
            msg = (
                "no job to join: neither TMOVER_JOB nor SLURM_JOB_ID is set; `tmover run` is "
                "started by the scheduler, see `tmover submit --help`"
            )
            raise ConfigError(msg)
        role = environ.get("TMOVER_ROLE", "member")
        if role not in {"member", "standby"}:
            msg = f"TMOVER_ROLE={role!r}: write member or standby"
            raise ConfigError(msg)
        host = environ.get("SLURMD_NODENAME") or socket.gethostname()
        slot = _number(environ, "TMOVER_SLOT")
        if slot is None and environ.get("SLURM_JOB_ID") and role == "member":
            slot = _number(environ, "SLURM_PROCID")
        return cls(
            state=state_directory(environ=environ),
            job=job,
            node=_name(environ, "TMOVER_NODE") or host,
            address=environ.get("TMOVER_ADDRESS", ""),
            standby=role == "standby",
            slot=slot,
        )

    def export(self) -> dict[str, str]:
        """Return the variables that `read` reads."""
        return {
            "TMOVER_STATE": str(self.state),
            "TMOVER_JOB": self.job,
            "TMOVER_NODE": self.node,
            "TMOVER_ADDRESS": self.address,
            "TMOVER_ROLE": "standby" if self.standby else "member",
            "TMOVER_SLOT": "" if self.slot is None else str(self.slot),
        }


class WorkerEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent tells its workers before they can speak to it."""

    agent: str | None
    """Where the agent listens (`ipc://...`); None outside of `tmover run`."""
    agent_pid: int | None
    parent_pid: int | None
    """The process that must be this one's parent, or it has been left alone."""
    local_rank: int
    address: str
    """Where this worker listens for other ranks."""
    inject: str
    """Faults to do on purpose, see `worker.inject`."""
    trace: str | None
    """The directory traces are written to."""
    trace_state: bool
    """Whether the trace has a digest of everything tracked after every step."""
    resume: bool = False
    """Whether to go on from the newest checkpoint of an earlier job."""
    checkpoints: bool = True
    """Whether `session.checkpoint` does anything."""

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> WorkerEnvironment:
        """Read it."""
        environ = os.environ if environ is None else environ
        return cls(
            agent=environ.get("TMOVER_AGENT"),
            agent_pid=_number(environ, "TMOVER_AGENT_PID"),
            parent_pid=_number(environ, "TMOVER_PARENT_PID"),
            local_rank=_number(environ, "LOCAL_RANK") or 0,
            address=environ.get("TMOVER_ADDRESS") or "127.0.0.1",
            inject=environ.get("TMOVER_INJECT", ""),
            trace=environ.get("TMOVER_TRACE"),
            trace_state=bool(_number(environ, "TMOVER_TRACE_STATE")),
            resume=environ.get("TMOVER_RESUME", "") not in ("", "0"),
            checkpoints=environ.get("TMOVER_CHECKPOINTS", "") != "0",
        )


def _name(environ: Mapping[str, str], variable: str) -> str:
    """Return a name that can be shown and sent."""
    text = environ.get(variable, "")
    if not text.isprintable() or " " in text:
        msg = f"{variable}={text!r} is no name: it has blanks, or what cannot be printed"
        raise ConfigError(msg)
    return text


def _number(environ: Mapping[str, str], variable: str) -> int | None:
    text = environ.get(variable, "")
    if not text:
        return None
    try:
        return int(text)
    except ValueError as error:
        msg = f"{variable}={text!r} is not a number"
        raise ConfigError(msg) from error
