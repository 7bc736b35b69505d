"""A batch script as `tmover submit` needs it: what it must not ask for, and the line that counts.

    srun --no-kill --kill-on-bad-exit=0 --output=%x.%j.%N.log tmover run train.py

Without `--no-kill` Slurm ends that job step when a node fails, without `--kill-on-bad-exit=0` when
one agent ends, and without a file for each node the output is lost with the node that srun is on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tmover.errors import ConfigError
from tmover.scheduler.slurm import shell
from tmover.scheduler.slurm.options import (
    Option,
    directives,
    last,
    merged,
    script_options,
    srun,
    tasks_per_node,
)

SRUN_OPTIONS = ("--no-kill", "--kill-on-bad-exit=0", "--output=%x.%j.%N.log")
LINE = " ".join(("srun", *SRUN_OPTIONS, "tmover run --nproc-per-node=... train.py"))
"""What a script must have."""

_ONE_TASK = ("--ntasks=$SLURM_NNODES", "--ntasks-per-node=1")

_TMOVER = re.compile(r"(?<![\w.-])tmover\s+(?:--log-level[ =]\S+\s+)?run(?![\w.-])")
_TORCHRUN = re.compile(
    r"(?:\S*/)?(?:torchrun|python[\d.]*\s+(?:-[^m\s]\S*\s+)*-m\s*torch\.distributed\.(?:run|launch))"
    r"(?![\w./-])"
)
_PER_NODE = re.compile(r"%\d*[Nnt]")
_ONE_NUMBER = re.compile(r"(\d+)(?:-\1)?")


class Problem(NamedTuple):
    """Why a script cannot be submitted so, in a sentence."""

    text: str
    line: int = 0
    """The line it is about; 0 if it is about no line."""
    mended: str = ""
    """What to write there instead, if that can be told. The same for all problems of a line."""


class Step(NamedTuple):
    """The line that starts the agents."""

    line: int
    before: str
    """The raw words before the command."""
    options: tuple[Option, ...]
    """What srun is called with."""
    raw_options: tuple[str, ...]
    """The same as it stands there."""
    program: tuple[shell.Word, ...]
    """What srun starts."""
    has_srun: bool

    @property
    def text(self) -> str:
        """What is started, without quotes."""
        return " ".join(word.text for word in self.program)

    @property
    def is_mended(self) -> bool:
        """Whether it is `tmover run` already."""
        return _TMOVER.search(self.text) is not None


def check(text: str, given: Sequence[Option] = ()) -> list[Problem]:
    """Return what keeps a script from being submitted; `given` are the options of the command line.

    Raises `ConfigError` if its `#SBATCH` lines cannot be read.
    """
    if not text.startswith("#!"):
        msg = (
            "this is no batch script: its first line is not like #!/bin/bash; to run a Python "
            "script on this machine, add --local"
        )
        return [Problem(msg, 1)]
    options = merged(script_options(text), given)
    return [*_of_directives(text), *_of_options(options), *_of_steps(text, options)]


def check_options(options: Sequence[Option]) -> list[Problem]:
    """Return what keeps a job from being submitted with these options, whatever its script."""
    return list(_of_options(options))


def steps(text: str) -> list[Step]:
    """Return the lines that start `tmover run`, or torchrun."""
    found = [step for command in shell.commands(text) if (step := _step(command)) is not None]
    return [step for step in found if step.has_srun] or found


def output_pattern(text: str) -> str:
    """Return where the script's `tmover run` writes, with srun's patterns; "" if it is not said."""
    for step in steps(text):
        if pattern := last(step.options, "output") or last(step.options, "error"):
            return pattern
    return ""


def _of_directives(text: str) -> Iterator[Problem]:
    for number, words in directives(text):
        if words[:1] in (["hetjob"], ["packjob"]):
            yield Problem("a heterogeneous job cannot be moved: ask for nodes of one kind", number)
            return


def _of_options(options: Sequence[Option]) -> Iterator[Problem]:
    if last(options, "array") is not None:
        yield Problem("a job array cannot be moved: submit one job at a time, without --array")
    nodes = last(options, "nodes")
    if nodes is not None and _ONE_NUMBER.fullmatch(nodes) is None:
        yield Problem(f"--nodes={nodes} is no fixed number of nodes: write one, such as --nodes=4")
    if nodes is None and any(_needs_nodes(option) for option in options):
        yield Problem("how many nodes the job gets is left to Slurm: say it with --nodes")
    for name, why in _REFUSED.items():
        if last(options, name) is not None:
            yield Problem(f"--{name}: {why}")
    if last(options, "no-kill") == "off":
        yield Problem("--no-kill=off has Slurm end the job when a node fails: leave it out")


def _needs_nodes(option: Option) -> bool:
    """Return whether Slurm may choose a number of nodes because of the option."""
    if option.name == "ntasks":
        return option.value != "1"
    return option.name in ("gpus", "nodelist", "nodefile")


_REFUSED = {
    "clusters": "the job's nodes must be in the cluster that the controller asks; leave it out",
    "wrap": "write the command into a script: its standbys are submitted with it, too",
    "wait": "leave it out; `tmover status` says how the job is",
    "test-only": "use --dry-run, which submits nothing",
    "help": "see `sbatch --help`",
    "usage": "see `sbatch --usage`",
    "version": "see `sbatch --version`",
}


def _of_steps(text: str, options: Sequence[Option]) -> Iterator[Problem]:
    found = steps(text)
    if not found:
        msg = (
            f"no line of the script starts `tmover run`: write `{LINE}`; if another script that it "
            "calls does, add --unchecked"
        )
        yield Problem(msg)
    known = shell.variables(text)
    for step in found:
        for why in _of_step(step, options, known):
            yield Problem(why, step.line, _mended(step, options))


def _of_step(step: Step, options: Sequence[Option], known: dict[str, str]) -> Iterator[str]:
    given = step.options
    if not step.has_srun:
        yield "without srun it runs on the job's first node only"
    if not step.is_mended:
        yield "torchrun starts it: `tmover run` must, which takes the same flags"
    if not step.has_srun:
        return
    no_kill = last(given, "no-kill")
    if no_kill == "off" or (no_kill is None and "SLURM_NO_KILL" not in known):
        yield "without --no-kill, Slurm ends all of it when a node fails"
    bad_exit = last(given, "kill-on-bad-exit")
    if bad_exit != "0" and (bad_exit is not None or known.get("SLURM_KILL_BAD_EXIT") != "0"):
        yield "without --kill-on-bad-exit=0, srun may end all of it when one node's part ends"
    output = last(given, "output") or known.get("SLURM_STDOUTMODE", "")
    if _PER_NODE.search(output) is None:
        yield (
            "without --output and a file for each node (%N in its name), the output is lost with "
            "the node that srun is on"
        )
    if any(_is_fixed(option) for option in given):
        yield "a fixed number or list of nodes or tasks does not fit the standbys: leave it out"
    if _tasks_per_node(options, given) > 1:
        yield (
            "several tasks would run on a node, and `tmover run` starts all workers of a node: add "
            + " ".join(_ONE_TASK)
        )


def _is_fixed(option: Option) -> bool:
    if option.name in ("nodelist", "nodefile", "relative"):
        return "$" not in (option.value or "")
    return option.name in ("nodes", "ntasks") and (option.value or "")[:1].isdigit()


def _tasks_per_node(options: Sequence[Option], given: Sequence[Option]) -> int:
    """Return how many tasks of the step a node gets, 1 if that cannot be told.

    The job's number of tasks goes before `--ntasks-per-node` of the step, but not `--ntasks`.
    """
    if last(given, "ntasks") is not None:
        return 1  # `_is_fixed` looks at it
    of_job = tasks_per_node(options)
    return of_job if of_job > 1 else tasks_per_node(given)


def _step(command: shell.Command) -> Step | None:
    """Return the command if it starts `tmover run` or torchrun, through srun or not."""
    words = command.words
    has_srun = os.path.basename(words[0].text) == "srun"  # noqa: PTH119 - a word, no path of here
    options: tuple[Option, ...] = ()
    program = words
    raw: tuple[str, ...] = ()
    if has_srun:
        try:
            found, count = srun.read([word.text for word in words[1:]])
        except ConfigError as error:
            text = " ".join(word.text for word in words)
            if not (_TMOVER.search(text) or _TORCHRUN.search(text)):
                return None
            msg = f"line {command.line}: {error}"
            raise ConfigError(msg) from error
        options, program = tuple(found), words[1 + count :]
        raw = tuple(word.raw for word in words[1 : 1 + count])
    text = " ".join(word.text for word in program)
    pattern = _TMOVER if _TMOVER.search(text) else _TORCHRUN
    begin = pattern.search(text)
    if begin is None or not (has_srun or begin.start() == 0):
        return None
    return Step(command.line, command.before, options, raw, program, has_srun)


def _mended(step: Step, options: Sequence[Option]) -> str:
    """Return the line as it should be, "" if the program is named by a variable."""
    program = " ".join(filter(None, (word.raw for word in step.program)))
    if not step.is_mended:
        program, count = _TORCHRUN.subn("tmover run", program, count=1)
        if not count:
            return ""
    flags = _mended_options(step)
    kept = [option for option in step.options if not _is_wrong(option)]
    if _tasks_per_node(options, kept) > 1:
        flags.extend(_ONE_TASK)
    return " ".join(filter(None, (step.before, "srun", *flags, program)))


def _mended_options(step: Step) -> list[str]:
    """Return srun's options as written, without what is wrong, and with what is missing."""
    kept: list[str] = []
    at = 0
    while at < len(step.raw_options):
        found, count = _one_option(step.raw_options[at:])
        if found is None or not _is_wrong(found):
            kept.extend(filter(None, step.raw_options[at : at + count]))
        at += count
    names = {option.name for option in step.options if not _is_wrong(option)}
    missing = [o for o in SRUN_OPTIONS if o[2:].partition("=")[0] not in names]
    return [*kept, *missing]


def _one_option(raw: Sequence[str]) -> tuple[Option | None, int]:
    """Return the option that the words begin with, and how many words it is."""
    for count in (1, 2):
        try:
            found, read = srun.read([word or "''" for word in raw[:count]])
        except ConfigError:
            continue
        if found and read == count:
            return found[0], count
    return None, 1


def _is_wrong(option: Option) -> bool:
    if option.name == "no-kill":
        return option.value == "off"
    if option.name == "kill-on-bad-exit":
        return option.value != "0"
    if option.name == "output":
        return _PER_NODE.search(option.value or "") is None
    if option.name == "ntasks-per-node":
        return option.value != "1"
    return _is_fixed(option)
