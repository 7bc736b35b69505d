"""`tmover run`: the agent of one node."""

from __future__ import annotations

import importlib.machinery
import os
import pathlib
import signal
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from tmover.environment import AgentEnvironment

if TYPE_CHECKING:
    from tmover.agent.launcher import Launcher, WorkerCommand

_PASSED_ON = {
    "--redirects": (("-r",), "SPEC", "Streams to write to files: 0 none, 1 out, 2 err, 3 both."),
    "--tee": (("-t",), "SPEC", "Streams to write to files as well."),
    "--log-dir": ((), "DIR", "Where these files are written."),
    "--local-ranks-filter": ((), "RANKS", "Show the output of these local ranks only."),
    "--role": ((), "NAME", "The workers' role."),
    "--monitor-interval": ((), "SECONDS", "How often torchrun looks at its workers."),
    "--duplicate-stdout-filters": ((), "WORDS", "As for torchrun."),
    "--duplicate-stderr-filters": ((), "WORDS", "As for torchrun."),
    "--event-log-handler": ((), "NAME", "As for torchrun."),
    "--logs-specs": ((), "NAME", "As for torchrun."),
    "--numa-binding": ((), "MODE", "As for torchrun."),
    "--signals-to-handle": ((), "NAMES", "As for torchrun."),
    "--shutdown-timeout": ((), "SECONDS", "As for torchrun."),
    "--start-method": ((), "METHOD", "As for torchrun."),
}
"""Torchrun's flags for the workers of a node: short names, value, help."""

_IGNORED = (
    "--nnodes", "--node-rank", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf",
    "--master-addr", "--master-port", "--local-addr", "--max-restarts",
)  # fmt: skip
"""Torchrun's flags for what the controller decides."""

_REFUSED = {
    "--no-python": "a rank of tmover lives in the script's Python process; name a Python script",
    "--run-path": "workers are started in processes of their own; leave it out",
    "--virtual-local-rank": "workers are told apart by LOCAL_RANK; leave it out",
}


def _torchrun_options(function: Callable[..., None]) -> Callable[..., None]:
    for name, (short, metavar, text) in reversed(_PASSED_ON.items()):
        function = click.option(*short, name, metavar=metavar, help=text)(function)
    for name in _IGNORED:
        function = click.option(name, hidden=True)(function)
    for name in ("--standalone", *_REFUSED):
        function = click.option(name, is_flag=True, hidden=True)(function)
    return function


@click.command(
    name="run",
    context_settings={
        "allow_interspersed_args": False,
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
    options_metavar="[FLAGS]",
)
@click.option(
    "--nproc-per-node",
    default="1",
    show_default=True,
    metavar="N",
    help="Workers on this node: a number, or auto, cpu, gpu, xpu.",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@_torchrun_options
@click.option("--config", type=click.Path(path_type=pathlib.Path), help="Configuration file.")
@click.argument("script", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
@click.pass_obj
def command(
    make_launcher: Callable[[WorkerCommand], Launcher] | None,
    /,
    *,
    nproc_per_node: str,
    module: bool,
    config: pathlib.Path | None,
    script: str | None,
    arguments: tuple[str, ...],
    **flags: Any,
) -> None:
    """Run SCRIPT on this node as a part of a job: what `torchrun` does in other jobs.

    The scheduler starts it, once per node. The job's name stands in TMOVER_JOB, the controller is
    found through the directory in TMOVER_STATE, and TMOVER_ROLE=standby makes the node a standby.

    FLAGS are torchrun's, those for the workers of one node; torchrun's flags for nodes and the
    rendezvous are ignored, because the controller decides that.
    """
    from tmover.agent.launcher import TorchrunLauncher, WorkerCommand, count_workers
    from tmover.agent.place import introduce
    from tmover.agent.run import run
    from tmover.config import load
    from tmover.process import SPARED

    signal.pthread_sigmask(signal.SIG_BLOCK, SPARED)  # until the agent listens to them
    checked = check_script(script, module=module)
    passed = _passed_on(flags)
    configuration = load(config)
    place = AgentEnvironment.read()
    if config is not None:
        os.environ["TMOVER_CONFIG"] = str(config.absolute())  # the workers read it too
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    worker = WorkerCommand(
        nproc=count_workers(nproc_per_node),
        script=checked,
        arguments=arguments,
        module=module,
        flags=passed,
    )
    launcher = (make_launcher or TorchrunLauncher)(worker)
    end = run(place, configuration, launcher, introduce(place, worker.nproc))
    click.echo(f"tmover: node {place.node}: {end.reason}", err=True)
    sys.exit(end.code)


def check_script(script: str | None, *, module: bool, command: str = "run") -> str:
    """Return the script if it is there and can be read: better said once now than by every worker.

    Nothing of it is run, and of a module only the package is looked for.
    """
    from tmover.errors import ConfigError

    if script is None:
        msg = f"no script given; see `tmover {command} --help`"
        raise ConfigError(msg)
    if module:
        package = script.partition(".")[0]
        if importlib.machinery.PathFinder.find_spec(package, ["", *sys.path]) is None:
            msg = f"there is no module {script!r}"
            raise ConfigError(msg)
    elif not pathlib.Path(script).is_file():
        msg = f"there is no script {script!r} in {pathlib.Path.cwd()}"
        raise ConfigError(msg)
    elif script.endswith(".py"):
        _check_syntax(script)
    return script


def _check_syntax(script: str) -> None:
    """Raise `ConfigError`, with the line, if the script is no Python: no process could begin it."""
    from tmover.errors import ConfigError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are the workers' to say
            compile(pathlib.Path(script).read_bytes(), script, "exec", dont_inherit=True)
    except OSError as error:
        msg = f"the script {script!r} cannot be read: {error.strerror}"
        raise ConfigError(msg) from error
    except (SyntaxError, ValueError) as error:
        where = getattr(error, "lineno", None)
        line = f", line {where}" if where else ""
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        msg = f"the script {script!r}{line}: {type(error).__name__}: {what}"
        raise ConfigError(msg) from error


def _passed_on(flags: dict[str, Any]) -> tuple[str, ...]:
    """Return torchrun's flags to pass on; refuse and ignore the others, saying so."""
    from tmover.errors import ConfigError

    names = {name: "--" + name.replace("_", "-") for name in flags}
    given = {names[name]: flags[name] for name in flags if flags[name] not in (None, False)}
    for name, why in _REFUSED.items():
        if name in given:
            msg = f"{name}: {why}"
            raise ConfigError(msg)
    ignored = [name for name in given if name not in _PASSED_ON]
    if ignored:
        click.echo(f"tmover: ignored {', '.join(ignored)}: the controller decides that", err=True)
    return tuple(part for name in _PASSED_ON if name in given for part in (name, given[name]))
