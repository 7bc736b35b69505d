"""The configuration. `TMOVER_*` is read from the environment here and in `environment` alone.

Flag before `TMOVER_<TABLE>_<KEY>` before file before default; of two files the user's own before
the site's, key by key. `conf/tmover.toml` shows every key with its default. Durations are in
seconds. A value is read once, checked, and passed on by hand.
"""

from __future__ import annotations

import difflib
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import msgspec

from tmover.bounds import check
from tmover.errors import ConfigError
from tmover.owner import PLACES, user_name

SITE_FILE = pathlib.Path("/etc/tmover/tmover.toml")
"""Read when neither `--config` nor `TMOVER_CONFIG` names a file; then the user's own is, too."""


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all tables."""


class ControllerConfig(_Table, frozen=True):
    """`[controller]`: the process that decides."""

    bind: str = "tcp://127.0.0.1:0"
    """Where agents and the command line connect; port 0 takes a free one."""
    lease_s: float = 4.0
    """An agent that was not heard of for so long is lost."""
    stuck_s: float = 60.0
    """A node for whose ranks all others wait, in the middle of a step, for so long is lost."""
    stuck_steps: float = 10.0
    """But not before so many steps of the usual length would have been done meanwhile."""
    stragglers: str = "observe"
    """A node slower than its peers is shown ("observe"), moved ("act"), or let be ("off")."""
    straggler_margin: float = 1.3
    """It is if its own part of a step takes more than so many times theirs."""
    straggler_for_s: float = 120.0
    """For so long."""
    straggler_cooldown_s: float = 600.0
    """With "act", a job is moved for that no more often than this."""
    poll_s: float = 1.0
    """How often the scheduler is asked for the state of its nodes."""
    request_s: float = 10.0
    """How long a command waits for the controller's answer."""
    journal_lines: int = 10_000
    """A job's journal that has grown by more lines than that, and by more than `journal_mib`, is
    replaced by a snapshot; what it was before is kept once."""
    journal_mib: float = 4.0
    """In MiB."""
    claim_s: float = 10.0
    """A controller on another machine that was not heard of for so long is taken for dead."""
    state: str = ""
    """The state directory of a controller for the whole cluster, "" if there is none."""
    users: tuple[str, ...] = ()
    """Whom a controller for the whole cluster serves; with MUNGE empty is everybody."""
    operators: tuple[str, ...] = ()
    """Users who may see, move and cancel everybody's jobs there, as root may."""
    private: bool = True
    """Users see their own jobs alone; otherwise also which jobs others have, without details."""
    identity: str = "auto"
    """What says who a user of a controller for the whole cluster is: "munge", "files", which are
    keys that the controller lays down for each of `users`, or "auto": MUNGE where it answers."""
    door: str = ""
    """Where users introduce themselves by MUNGE; "" is the port after that of `bind`."""
    munge_socket: str = ""
    """Munged's socket on all nodes, "" if it is where it usually is."""


class DeadlineConfig(_Table, frozen=True):
    """`[deadlines]`: how long the controller waits for each thing it waits for."""

    form_s: float = 600.0
    """From the job's start until all ranks have entered the training loop."""
    accuse_s: float = 0.2
    """From the first sign of a failure until the lost are named."""
    report_s: float = 300.0
    """From a revocation until all survivors have reported; longer than any step takes."""
    prepare_s: float = 60.0
    """For phase 1 of a move, training going on."""
    switch_s: float = 60.0
    """For phase 2: state handed over, links exchanged, everybody past the barrier."""
    standby_s: float = 600.0
    """For a standby to become warm once the job waits for one."""
    node_s: float = 3600.0
    """For somebody to take a lost node's place while all others stand still; 0 is for ever. Then
    the survivors store a checkpoint, and the job ends with exit code 75, to be requeued."""
    store_s: float = 600.0
    """For the survivors' checkpoint to be written then."""


class AgentConfig(_Table, frozen=True):
    """`[agent]`: `tmover run`, one per node."""

    heartbeat_s: float = 0.5
    """How often the controller hears of the node."""
    join_s: float = 60.0
    """How long a new agent looks for its controller before it gives up."""
    retry_s: float = 2.0
    """The longest pause between two attempts to reach the controller."""
    stop_s: float = 10.0
    """How long workers that were told to end may take before they are killed."""
    stopped_s: float = 2.0
    """A worker stopped by a signal (SIGSTOP) for so long counts as failed."""
    watch_s: float = 0.5
    """How often the workers' state is looked at; a death is noticed at once."""


class LinkConfig(_Table, frozen=True):
    """`[links]`: connections between ranks, and when a silent one counts as broken."""

    handshake_s: float = 10.0
    """Until the other end has proved that it knows the job's secret."""
    collective_s: float = 1800.0
    """From the start of a collective to its end; a process group's own timeout goes before it."""
    barrier_s: float = 120.0
    """For the commit barrier of a switch, if no controller says that it is over."""
    state_s: float = 60.0
    """For one read or write of state that is handed over."""
    idle_s: int = 1
    """A link on which nothing has come for so long is probed."""
    interval_s: int = 1
    """The time between two probes."""
    probes: int = 3
    """A link is broken after so many probes without an answer."""
    unacked_s: float = 3.5
    """A link is broken when what was sent is not acknowledged for so long."""


class CommConfig(_Table, frozen=True):
    """`[comm]`: how ranks speak to each other."""

    nearby: bool = True
    """Ranks of one host use Unix sockets; otherwise TCP as the others do."""
    fabric: str = "links"
    """What carries collectives: "links", or "generation", which is torch's own communicators."""


class WorkerConfig(_Table, frozen=True):
    """`[worker]`: what sits inside a rank."""

    fence_after_s: float = 600.0
    """A rank with a broken link and no controller waits so long, frozen, and then ends itself."""
    copy_every: int = 1
    """Where ranks have no replicas: copy what each holds to other nodes after so many steps."""
    copies: int = 1
    """To how many other nodes; so many may be lost at once. A rank keeps those of as many ranks."""
    rehearse_steps: int = 3
    """Steps a standby rehearses: a cold one, one in which DDP rebuilds its buckets, a usual one."""
    prove_every_s: float = 300.0
    """How often a standby at rest does another step, to show that it still can; 0 is never."""
    prove_s: float = 600.0
    """How long that may take; then its processes end, and are started afresh."""
    scratch: str = ""
    """Where files go that a rehearsal writes, "" if where the script says; local to the node."""
    keep_scratch: bool = False
    """Whether they stay there when the rehearsal is over."""
    recordings: str = "auto"
    """Where ranks record what standbys rehearse with: "auto" is in the state directory, "" none."""
    recordings_mib: int = 256
    """How much of a job is recorded, in MiB; what is over that is left out, the biggest first."""
    recording_s: float = 60.0
    """A standby whose script fails on made-up values waits so long for recorded ones to begin anew.
    """
    sibling_s: float = 60.0
    """How long workers of one standby wait for each other; then they rehearse each alone."""
    unwind_s: float = 60.0
    """How long a script may take to end that is to be run again; then its process is ended."""


class LocalConfig(_Table, frozen=True):
    """`[local]`: the local scheduler, whose nodes are process groups on this machine."""

    nodes: int = 64
    """The most nodes it makes; their addresses are 127.0.0.2 and up."""


class SlurmConfig(_Table, frozen=True):
    """`[slurm]`: how Slurm is asked."""

    poll_s: float = 10.0
    """How often jobs and nodes are asked for: all jobs of this controller in one call."""
    back_off_s: float = 60.0
    """The longest pause while slurmctld does not answer."""
    command_s: float = 30.0
    """How long a command of Slurm may take."""
    end_s: float = 30.0
    """How long a job whose training has ended may take to end by itself, before `scancel`."""


class StandbyConfig(_Table, frozen=True):
    """`[standby]`: how standbys are asked of Slurm. An empty value leaves Slurm's default."""

    partition: str = ""
    """The partition to take them from."""
    reservation: str = ""
    """The reservation to take them from, such as an administrator's pool."""
    qos: str = ""
    """The quality of service they are asked with."""
    prefer: str = ""
    """Features of the nodes to take if there is a choice (`--prefer`)."""
    count: int = 0
    """How many a job keeps if `tmover submit` does not say."""
    pool: str = ""
    """A user's jobs of one pool lend each other standbys; "" is none."""


class Config(_Table, frozen=True):
    """The whole file."""

    controller: ControllerConfig = ControllerConfig()
    deadlines: DeadlineConfig = DeadlineConfig()
    agent: AgentConfig = AgentConfig()
    links: LinkConfig = LinkConfig()
    comm: CommConfig = CommConfig()
    worker: WorkerConfig = WorkerConfig()
    local: LocalConfig = LocalConfig()
    slurm: SlurmConfig = SlurmConfig()
    standby: StandbyConfig = StandbyConfig()


def load(path: pathlib.Path | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """Return the configuration. Raises `ConfigError` naming the file or variable, and the key."""
    environ = os.environ if environ is None else environ
    if path is None and environ.get("TMOVER_CONFIG"):
        path = pathlib.Path(environ["TMOVER_CONFIG"])
    paths = [path] if path is not None else [*_site_file(), *_own_file(environ)]
    tables: dict[str, Any] = {}
    for each in paths:
        for name, table in _read(each).items():
            tables.setdefault(name, {}).update(table)
    config = _override(msgspec.convert(tables, Config), environ)
    check(config, source=" and ".join(map(str, paths)) or "the environment")
    return config


def own_file(environ: Mapping[str, str] | None = None) -> pathlib.Path:
    """Return the user's own configuration file, which need not be there: XDG, home."""
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_CONFIG_HOME")
    return (pathlib.Path(base) if base else pathlib.Path.home() / ".config") / "tmover/tmover.toml"


def state_directory(
    flag: pathlib.Path | None = None,
    environ: Mapping[str, str] | None = None,
    configuration: Config | None = None,
) -> pathlib.Path:
    """Return where controller, keys and journal are kept.

    The flag, `TMOVER_STATE`, the user's directory at the cluster's controller, XDG, home, in this
    order. The configuration is read if it is not given, which may raise `ConfigError`.
    """
    environ = os.environ if environ is None else environ
    if flag is not None:
        return flag.absolute()
    if environ.get("TMOVER_STATE"):
        return pathlib.Path(environ["TMOVER_STATE"]).absolute()
    cluster = (configuration or load(environ=environ)).controller.state
    if not cluster:
        return own_state_directory(environ)
    place = pathlib.Path(cluster).absolute()
    return place if os.geteuid() == 0 else place / PLACES / user_name()


def own_state_directory(environ: Mapping[str, str] | None = None) -> pathlib.Path:
    """Return the state directory of whoever has a controller of their own: XDG, home."""
    environ = os.environ if environ is None else environ
    if environ.get("XDG_STATE_HOME"):
        return pathlib.Path(environ["XDG_STATE_HOME"]).absolute() / "tmover"
    return pathlib.Path.home() / ".local" / "state" / "tmover"


def slurm_job(id_: int, restarts: int = 0) -> str:
    """Return our name of a job of Slurm: `slurm7`; `slurm7r2`, since a requeued one is another."""
    return f"slurm{id_}r{restarts}" if restarts else f"slurm{id_}"


def is_slurm_job(name: str) -> bool:
    """Return whether this is our name of a job of Slurm."""
    return name.startswith("slurm")


def _site_file() -> list[pathlib.Path]:
    return [SITE_FILE] if SITE_FILE.exists() else []


def _own_file(environ: Mapping[str, str]) -> list[pathlib.Path]:
    """Return the user's file, if there is one. Under sudo another's is not taken for it."""
    try:
        path = own_file(environ)
        found = path.stat()
    except (OSError, RuntimeError):  # it is not there, or there is no home
        return []
    if found.st_uid != os.geteuid():
        return []
    if found.st_mode & 0o022:
        msg = f"others can write to {path}: `chmod go-w {path}`"
        raise ConfigError(msg)
    return [path]


def _read(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Return what a file says, which must be a configuration."""
    try:
        data = path.read_bytes()
        msgspec.toml.decode(data, type=Config)
        tables: dict[str, dict[str, Any]] = msgspec.toml.decode(data)
        return tables
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        msg = f"{path}: {error}"
        raise ConfigError(msg) from error


def _override(config: Config, environ: Mapping[str, str]) -> Config:
    """Return `config` with every `TMOVER_<TABLE>_<KEY>` of the environment put in."""
    tables: dict[str, dict[str, Any]] = msgspec.to_builtins(config)
    for variable in sorted(environ):
        prefix, _, key = variable.removeprefix("TMOVER_").lower().partition("_")
        if not variable.startswith("TMOVER_") or prefix not in tables or variable in _OTHER:
            continue
        if key not in tables[prefix]:
            near = difflib.get_close_matches(key, tables[prefix], n=1)
            hint = f"; did you mean TMOVER_{prefix.upper()}_{near[0].upper()}?" if near else ""
            msg = f"{variable}: [{prefix}] has no key {key!r}{hint}"
            raise ConfigError(msg)
        tables[prefix][key] = _convert(variable, environ[variable], tables[prefix][key])
    return msgspec.convert(tables, Config)


_OTHER = frozenset({"TMOVER_AGENT", "TMOVER_AGENT_PID"})
"""Variables that look like a table's key and are none."""


def _convert(variable: str, text: str, default: Any) -> Any:
    if isinstance(default, (tuple, list)):
        return [part for part in text.split(",") if part]
    try:
        return msgspec.convert(text, type(default), strict=False)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        msg = f"{variable}={text!r}: {error}"
        raise ConfigError(msg) from error
