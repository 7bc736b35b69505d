"""A job as `tmover submit` describes it to Slurm: looked at, checked, and shown by `--dry-run`."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shlex
import shutil
from typing import TYPE_CHECKING

import click

from tmover.cli.local import check_environment
from tmover.cli.text import plain
from tmover.config import Config, ControllerConfig, own_state_directory, state_directory
from tmover.errors import ConfigError
from tmover.owner import is_anothers, user_name
from tmover.scheduler.slurm import render
from tmover.scheduler.slurm import script as scripts
from tmover.scheduler.slurm.commands import salloc_argv, sbatch_argv
from tmover.scheduler.slurm.options import Option, last, merged, script_options

if TYPE_CHECKING:
    from collections.abc import Sequence

_PLACEHOLDER = "<the job's nodes>"
_ANY_ADDRESS = "tcp://0.0.0.0:0"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchJob:
    """What is to be submitted."""

    script: pathlib.Path
    text: str
    arguments: tuple[str, ...]
    given: tuple[Option, ...]
    """sbatch's options of the command line."""
    asked: tuple[Option, ...]
    """The same, and those of the script."""
    standby: int
    pool: str
    headless: bool
    configuration: Config
    config: pathlib.Path | None
    """The configuration file named on the command line."""
    state: pathlib.Path
    resume: bool = False
    """Whether it goes on from the newest checkpoint of an earlier job."""

    @property
    def name(self) -> str:
        """Slurm's name of the job."""
        name = last(self.given, "job-name") or os.environ.get("SBATCH_JOB_NAME")
        return name or last(self.asked, "job-name") or self.script.name

    @property
    def cwd(self) -> str:
        """Where the script runs."""
        return str(pathlib.Path.cwd() / (last(self.asked, "chdir") or ""))

    @property
    def env(self) -> dict[str, str]:
        """What it is submitted with."""
        env = {**render.environment(os.environ), "TMOVER_STATE": str(self.state)}
        if self.config is not None:
            env["TMOVER_CONFIG"] = str(self.config.absolute())
        if self.resume:
            env["TMOVER_RESUME"] = "1"
        return env

    def options(self) -> list[str]:
        """Return the options of the command that submits it."""
        if self.headless:
            return render.allocation_options(self.asked, self.name)
        return render.job_options(self.given, self.asked)

    def controller_flags(self) -> list[str]:
        """Return the flags of the controller that is started for it: nodes must reach it."""
        flags = [] if self.config is None else ["--config", str(self.config.absolute())]
        if self.configuration.controller.bind == ControllerConfig().bind:
            flags.extend(["--bind", _ANY_ADDRESS])
        return flags

    def logs(self, job: str) -> str:
        """Return where the nodes' output is found."""
        pattern = scripts.output_pattern(self.text)
        if not pattern:
            plain_output = last(self.asked, "output") or "slurm-%j.out"
            pattern = render.step_output(self.asked, "%N") if self.headless else plain_output
        user = user_name()
        return render.log_glob(pattern, cwd=self.cwd, name=self.name, job=job, user=user)


def describe(
    script: pathlib.Path,
    arguments: Sequence[str],
    given: Sequence[Option],
    configuration: Config,
    *,
    standby: int | None,
    pool: str,
    headless: bool,
    state: pathlib.Path | None,
    config: pathlib.Path | None,
    resume: bool = False,
) -> BatchJob:
    """Return the job that the command line describes. Raises `ConfigError`."""
    check_environment()
    text = _read(script)
    exported = os.environ.get("SBATCH_EXPORT")
    environ = [] if exported is None else [Option("export", exported)]
    try:
        of_script = script_options(text)
    except ConfigError as error:
        msg = f"{script}: {error}"
        raise ConfigError(msg) from error
    return BatchJob(
        script=script,
        text=text,
        arguments=tuple(arguments),
        given=tuple(merged(given)),
        asked=tuple(merged(of_script, environ, given)),
        standby=configuration.standby.count if standby is None else standby,
        pool=pool,
        headless=headless,
        configuration=configuration,
        config=config,
        state=state_directory(state, configuration=configuration),
        resume=resume,
    )


def _read(script: pathlib.Path) -> str:
    try:
        text = script.read_bytes().decode()
    except UnicodeDecodeError as error:
        msg = f"{script} is not UTF-8: {error.reason} at byte {error.start}"
        raise ConfigError(msg) from error
    except OSError as error:
        hint = "; to run it on this machine, add --local" if script.suffix == ".py" else ""
        why = (error.strerror or str(error)).lower()
        msg = f"cannot read the batch script {script}: {why}{hint}"
        raise ConfigError(msg) from error
    if "\r\n" in text:
        msg = f"{script} has lines that end as on DOS, which sbatch refuses: `sed -i 's/\\r$//'`"
        raise ConfigError(msg)
    return text


def check(job: BatchJob, *, unchecked: bool) -> None:
    """Say what is wrong with the job, and how to mend it. Raises `ConfigError` if anything is."""
    problems = scripts.check_options(job.asked) if unchecked else scripts.check(job.text, job.given)
    if not problems:
        return
    *others, final = problems
    for problem, following in zip(others, problems[1:], strict=True):
        click.echo(plain(_said(job, problem)), err=True)
        if problem.mended and following.line != problem.line:
            click.echo(f"  write: {plain(problem.mended)}", err=True)
    mended = f"; write: {final.mended}" if final.mended else ""
    msg = f"{_said(job, final)}{mended}"
    raise ConfigError(msg)


def _said(job: BatchJob, problem: scripts.Problem) -> str:
    where = f"{job.script}:{problem.line}" if problem.line else str(job.script)
    return f"{where}: {problem.text}"


# --- the dry run ----------------------------------------------------------------------------------


def show(job: BatchJob, *, as_json: bool) -> None:
    """Show every command and script."""
    parts = _parts(job)
    if as_json:
        click.echo(json.dumps([part for part in parts if part], indent=2))
        return
    for part in parts:
        click.echo(f"# {part['what']}")
        if "command" in part:
            click.echo(plain(str(part["command"])))
        else:
            for line in str(part["script"]).splitlines():
                click.echo(f"| {plain(line.expandtabs())}")
        click.echo()


def _parts(job: BatchJob) -> list[dict[str, str]]:
    controller = ["tmover", "controller", "--state", str(job.state), *job.controller_flags()]
    parts = [] if is_anothers(job.state) else [_command("a controller, if none runs", controller)]
    env = ["env", f"TMOVER_STATE={job.state}", *(["TMOVER_RESUME=1"] if job.resume else [])]
    nnodes = last(job.asked, "nodes") or "1"
    if job.headless:
        command = salloc_argv(job.options())
        parts.append(_command(f"the job: it holds {nnodes} nodes", command))
        copy = str(headless_directory(job, "<JOB>") / "script")
        step = render.step_argv(
            "<JOB>", "<NODE>", [copy, *job.arguments], name=job.name, cwd=job.cwd, asked=job.asked
        )
        parts.append(_command("on each of its nodes", [*env, "TMOVER_SLOT=<0, 1, ...>", *step]))
        parts.append({"what": "an `srun` before the real one", "script": render.shim(real_srun())})
    else:
        command = [*env, *sbatch_argv(job.options(), str(job.script), job.arguments)]
        parts.append(_command(f"the job: {nnodes} nodes", command))
    parts.append({"what": "the job's script", "script": job.text})
    if job.standby:
        parts.extend(_standby_parts(job, int(nnodes.partition("-")[0])))
    return parts


def _standby_parts(job: BatchJob, nnodes: int) -> list[dict[str, str]]:
    name = "slurm<JOB>"
    base = render.standby_base(job.asked, nnodes)
    options = render.standby_options(
        base, job.configuration.standby, name, job.name, [_PLACEHOLDER]
    )
    role = ["env", "TMOVER_ROLE=standby", f"TMOVER_JOB={name}", f"TMOVER_STATE={job.state}"]
    command = [*role, *sbatch_argv(options, "<SCRIPT>", job.arguments)]
    what = f"each of its {job.standby} standbys, once the job's nodes are known"
    script = render.standby_script(job.text)
    return [_command(what, command), {"what": "a standby's script", "script": script}]


def _command(what: str, argv: Sequence[str]) -> dict[str, str]:
    return {"what": what, "command": " ".join(map(_quoted, argv))}


def _quoted(word: str) -> str:
    """Return a word for a shell, as readable as can be."""
    is_plain = "'" in word and not set('"$`\\!') & set(word)
    return f'"{word}"' if is_plain else shlex.quote(word)


def headless_directory(job: BatchJob, number: str) -> pathlib.Path:
    """Return where the script and the `srun` of a job without a batch host are kept."""
    own = own_state_directory() if is_anothers(job.state) else job.state
    return own / "headless" / f"slurm{number}"


def real_srun() -> str:
    """Return the path of Slurm's srun."""
    return shutil.which("srun") or "srun"
