"""Options of sbatch, srun and salloc: which are there, which take a value, how they are read.

Slurm reads them as GNU getopt does: `-N4`, `-N 4`, `--nodes=4`, `--nodes 4`, `--node=4` if nothing
else begins so; one whose value is optional takes it after `=` only. The table holds the options of
22.05 to 26.05. Options that a site's plugins add are not known here: they are passed on, but their
value must stand after an `=`.
"""

from __future__ import annotations

import enum
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from tmover.errors import ConfigError


class Takes(enum.Enum):
    """Whether an option takes a value."""

    NOTHING = enum.auto()
    VALUE = enum.auto()
    MAYBE = enum.auto()


class Option(NamedTuple):
    """One option as it was given, under its long name."""

    name: str
    value: str | None = None

    def __str__(self) -> str:
        """Return it as one word of a command."""
        return f"--{self.name}" if self.value is None else f"--{self.name}={self.value}"


_SHORT = {
    "A": "account", "a": "array", "b": "begin", "B": "extra-node-info", "c": "cpus-per-task",
    "C": "constraint", "d": "dependency", "D": "chdir", "e": "error", "F": "nodefile",
    "G": "gpus", "h": "help", "H": "hold", "i": "input", "J": "job-name", "k": "no-kill",
    "L": "licenses", "m": "distribution", "M": "clusters", "n": "ntasks", "N": "nodes",
    "o": "output", "O": "overcommit", "p": "partition", "q": "qos", "Q": "quiet",
    "s": "oversubscribe", "S": "core-spec", "t": "time", "v": "verbose", "V": "version",
    "w": "nodelist", "W": "wait", "x": "exclude",
}  # fmt: skip

_FLAGS = (
    "consolidate-segments contiguous help hold ignore-pbs no-requeue overcommit oversubscribe "
    "parsable quiet reboot requeue spread-job spread-segments stepmgr test-only usage "
    "use-min-nodes verbose version wait"
)
_VALUES = (
    "account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment "
    "constraint container container-id core-spec cores-per-socket cpu-freq cpus-per-gpu "
    "cpus-per-task deadline delay-boot dependency distribution error exclude export export-file "
    "extra extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task "
    "gres gres-flags hint input job-name kill-on-invalid-dep licenses mail-type mail-user "
    "mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nodefile nodelist nodes ntasks "
    "ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode output partition "
    "power prefer priority profile qos reservation segment signal sockets-per-node switches "
    "thread-spec threads-per-core time time-min tmp tres-bind tres-per-task uid wait-all-nodes "
    "wckey wrap"
)
_MAYBES = "exclusive get-user-env nice no-kill oom-kill-step propagate resv-ports"

SBATCH = {
    **dict.fromkeys(_FLAGS.split(), Takes.NOTHING),
    **dict.fromkeys(_VALUES.split(), Takes.VALUE),
    **dict.fromkeys(_MAYBES.split(), Takes.MAYBE),
}
"""The options of sbatch."""

_SRUN_SHORT = {
    **_SHORT, "E": "preserve-env", "I": "immediate", "K": "kill-on-bad-exit", "l": "label",
    "r": "relative", "T": "threads", "u": "unbuffered", "W": "wait", "X": "disable-status",
    "Z": "no-allocate",
}  # fmt: skip

_SRUN_FLAGS = (
    "debugger-test disable-status exact interactive label multi-prog no-allocate preserve-env "
    "quit-on-interrupt unbuffered whole"
)
_SRUN_VALUES = (
    "accel-bind bcast-exclude cpu-bind epilog het-group jobid mpi msg-timeout prolog relative "
    "slurmd-debug task-epilog task-prolog threads treewidth wait"
)
_SRUN_MAYBES = "bcast compress immediate kill-on-bad-exit overlap pty send-libs x11"

SRUN = {
    **SBATCH,
    **dict.fromkeys(_SRUN_FLAGS.split(), Takes.NOTHING),
    **dict.fromkeys(_SRUN_VALUES.split(), Takes.VALUE),
    **dict.fromkeys(_SRUN_MAYBES.split(), Takes.MAYBE),
}
"""The options of srun, and a few of sbatch that it does not have."""

_ONLY_BATCH = (
    "array batch error export export-file ignore-pbs input no-requeue open-mode output parsable "
    "propagate requeue test-only wait wrap"
)


class Grammar:
    """The options of one command."""

    def __init__(self, command: str, long: dict[str, Takes], short: dict[str, str]) -> None:
        self.command = command
        self._long = long
        self._short = short

    def extended(self, command: str, more: dict[str, Takes]) -> Grammar:
        """Return the grammar with other options besides."""
        return Grammar(command, {**self._long, **more}, self._short)

    def read(self, words: Sequence[str]) -> tuple[list[Option], int]:
        """Return the options that `words` begin with, and how many words they are.

        They end at the first word that is none, or after `--`. Raises `ConfigError`.
        """
        options: list[Option] = []
        at = 0
        while at < len(words) and words[at].startswith("-") and words[at] != "-":
            if words[at] == "--":
                return options, at + 1
            found, at = self._read_one(words, at)
            options.extend(found)
        return options, at

    def _read_one(self, words: Sequence[str], at: int) -> tuple[list[Option], int]:
        word = words[at]
        if not word.startswith("--"):
            return self._read_short(words, at)
        written, equals, value = word[2:].partition("=")
        name = self._complete(written, has_value=bool(equals))
        takes = self._long.get(name, Takes.MAYBE)
        if equals:
            if takes is Takes.NOTHING:
                msg = f"{self.command}: --{name} takes no value, and {word} gives it one"
                raise ConfigError(msg)
            return [Option(name, value)], at + 1
        if takes is not Takes.VALUE:
            return [Option(name)], at + 1
        return [Option(name, self._following(words, at, f"--{name}"))], at + 2

    def _read_short(self, words: Sequence[str], at: int) -> tuple[list[Option], int]:
        """Read a word such as `-N4`, `-Hk` or `-p`."""
        options: list[Option] = []
        letters = words[at][1:]
        for place, letter in enumerate(letters, start=1):
            if letter not in self._short:
                msg = f"{self.command} has no option -{letter}, which is in {words[at]!r}"
                raise ConfigError(msg)
            name, rest = self._short[letter], letters[place:]
            takes = self._long[name]
            if takes is Takes.NOTHING:
                options.append(Option(name))
                continue
            if takes is Takes.MAYBE:
                return [*options, Option(name, rest or None)], at + 1
            if rest:
                return [*options, Option(name, rest)], at + 1
            value = self._following(words, at, f"-{letter}")
            return [*options, Option(name, value)], at + 2
        return options, at + 1

    def _complete(self, written: str, *, has_value: bool) -> str:
        """Return the long name that was written, maybe shortened."""
        if written in self._long:
            return written
        near = sorted(name for name in self._long if written and name.startswith(written))
        if len(near) == 1:
            return near[0]
        if near:
            likely = ", ".join(f"--{name}" for name in near)
            msg = f"{self.command}: --{written} is the beginning of {likely}; write it out"
            raise ConfigError(msg)
        if has_value:
            return written  # a plugin's, or a newer Slurm's: it will say if it has none such
        msg = (
            f"{self.command}: --{written} is not known here: write --{written}=VALUE if Slurm has "
            "it, and put a `--` before what is meant for the script"
        )
        raise ConfigError(msg)

    def _following(self, words: Sequence[str], at: int, shown: str) -> str:
        if at + 1 >= len(words):
            msg = f"{self.command}: {shown} needs a value"
            raise ConfigError(msg)
        return words[at + 1]


sbatch = Grammar("sbatch", SBATCH, _SHORT)
srun = Grammar("srun", SRUN, _SRUN_SHORT)


def directives(text: str) -> Iterator[tuple[int, list[str]]]:
    r"""Yield the words of each `#SBATCH` line, with its number; sbatch stops at the first command.

    >>> list(directives("#!/bin/sh\n#SBATCH -N 2 # two\n\ntrue\n#SBATCH -N 3\n"))
    [(2, ['-N', '2'])]
    """
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("#SBATCH") and line[7:8].isspace():
            try:
                yield number, shlex.split(line[7:], comments=True)
            except ValueError as error:
                msg = f"line {number}: {line.strip()!r} cannot be read: {str(error).lower()}"
                raise ConfigError(msg) from error
        elif line.strip() and not line.startswith("#"):
            return


def script_options(text: str) -> list[Option]:
    """Return what the `#SBATCH` lines of a batch script ask for. Raises `ConfigError`."""
    options: list[Option] = []
    for number, words in directives(text):
        if words[:1] in (["hetjob"], ["packjob"]):
            continue
        try:
            found, _ = sbatch.read(_joined(words))
        except ConfigError as error:
            msg = f"line {number}: {error}"
            raise ConfigError(msg) from error
        options.extend(found)
    return options


def _joined(words: list[str]) -> list[str]:
    """Return the words, each option of a plugin as one word, or left out if it has no value."""
    joined: list[str] = []
    at = 0
    while at < len(words):
        word, following = words[at], words[at + 1 : at + 2]
        at += 1
        if not word.startswith("--") or "=" in word or _is_known(word[2:]):
            joined.append(word)
        elif following and not following[0].startswith("-"):
            joined.append(f"{word}={following[0]}")
            at += 1
    return joined


def _is_known(name: str) -> bool:
    return any(known.startswith(name) for known in SBATCH)


def last(options: Iterable[Option], name: str) -> str | None:
    """Return the value that counts: the last one. "" for an option without."""
    values = [option.value or "" for option in options if option.name == name]
    return values[-1] if values else None


def without(options: Iterable[Option], names: Collection[str]) -> list[Option]:
    """Return the options but those of these names."""
    return [option for option in options if option.name not in names]


def merged(*sources: Iterable[Option]) -> list[Option]:
    """Return one option of each name, later sources going before earlier ones."""
    found: dict[str, Option] = {}
    for source in sources:
        for option in source:
            found.pop(option.name, None)
            found[option.name] = option
    return list(found.values())


def tasks_per_node(options: Iterable[Option]) -> int:
    """Return how many tasks a node of the job gets, 1 if that cannot be told.

    >>> tasks_per_node([Option("ntasks", "8"), Option("nodes", "2")])
    4
    """
    options = list(options)
    per_node = last(options, "ntasks-per-node") or ""
    if per_node.isdigit():
        return int(per_node)
    tasks, nodes = last(options, "ntasks") or "", (last(options, "nodes") or "").partition("-")[0]
    if tasks.isdigit() and nodes.isdigit():
        return max(1, -(-int(tasks) // max(1, int(nodes))))
    return 1


def of_salloc(options: Iterable[Option]) -> list[Option]:
    """Return the options that salloc has, too."""
    return without(options, _ONLY_BATCH.split())
