"""The commands by which a job and its standbys are submitted. Pure: nothing is run here.

A standby is submitted with the job's own options, from the command line and from the script, but
for those that say how many nodes or which, when, and under what name; its script is the job's with
the `#SBATCH` lines made comments, because some of them cannot be taken back by another option.
"""

from __future__ import annotations

import pathlib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

from tmover.config import StandbyConfig
from tmover.scheduler.slurm.options import (
    Option,
    directives,
    last,
    merged,
    of_salloc,
    sbatch,
    tasks_per_node,
    without,
)
from tmover.scheduler.slurm.run import scrubbed

_OWN = frozenset({"no-kill", "parsable", "quiet", "verbose"})
"""What tmover sets itself in every submission, or needs to be left out."""

_WHOLE_JOB = (
    "array batch begin bb bbf comment consolidate-segments contiguous deadline dependency extra "
    "gpus hold job-name kill-on-invalid-dep mail-type mail-user no-requeue nodefile nodelist "
    "nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket requeue segment "
    "signal spread-job spread-segments switches use-min-nodes wait wait-all-nodes"
)
"""What makes sense for the whole job only, or once."""

_PER_JOB = (
    "TMOVER_JOB", "TMOVER_ROLE", "TMOVER_SLOT", "TMOVER_NODE", "TMOVER_ADDRESS", "TMOVER_AGENT",
    "TMOVER_AGENT_PID", "SBATCH_WAIT", "SBATCH_ARRAY_INX", "SBATCH_NO_KILL", "SALLOC_NO_KILL",
)  # fmt: skip
"""Variables that must not reach a job from where it was submitted."""

_PASSED = ("TMOVER_STATE", "TMOVER_CONFIG", "TMOVER_RESUME")
_PASSED_TO_STANDBY = (*_PASSED, "TMOVER_ROLE", "TMOVER_JOB")
_JOB_ID = re.compile(r"%\d*[AjJ]")


# --- the job --------------------------------------------------------------------------------------


def job_options(given: Iterable[Option], asked: Iterable[Option]) -> list[str]:
    """Return sbatch's options for the job, without `--parsable`.

    `given` are those of the command line, `asked` those of the script as well.
    """
    user = without(merged(given), _OWN | {"export"})
    return ["--no-kill", _export(last(asked, "export"), _PASSED), *map(str, user)]


def allocation_options(options: Iterable[Option], name: str) -> list[str]:
    """Return salloc's options for a job without a batch script, without `--no-shell`."""
    user = without(of_salloc(merged(options)), _OWN | {"job-name"})
    return ["--no-kill", f"--job-name={name}", *map(str, user)]


def step_argv(
    job: str, node: str, script: Sequence[str], *, name: str, cwd: str, asked: Iterable[Option]
) -> list[str]:
    """Return how the script is started on one node of such a job."""
    asked = list(asked)
    export = _export(last(asked, "export"), (*_PASSED, "TMOVER_SLOT", "PATH"))
    return [
        "srun", f"--jobid={job}", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--overlap",
        "--no-kill", f"--job-name={name}", f"--chdir={cwd}", export,
        f"--output={_named(step_output(asked, node), name)}", *script,
    ]  # fmt: skip


def _named(pattern: str, name: str) -> str:
    """Return the pattern with the job's name for `%x`; srun outside of the job writes `(null)`.

    >>> _named("%x.%%x.%j", "gpt")
    'gpt.%%x.%j'
    """
    put_in = {"%x": name.replace("%", "%%")}
    return re.sub(r"%%|%x", lambda found: put_in.get(found[0], found[0]), pattern)


def step_output(asked: Iterable[Option], node: str) -> str:
    """Return where the script's own output goes on a node of such a job.

    >>> step_output([Option("output", "%x.%j.out")], "n1")
    '%x.%j.out.n1'
    """
    pattern = last(asked, "output") or "slurm-%j.out"
    named = re.sub(r"%\d*N", node, pattern)
    return named if named != pattern or pattern == "/dev/null" else f"{pattern}.{node}"


def shim(command: str) -> str:
    """Return a script `srun` that keeps the job steps a node starts on that node.

    Without it they start on the first node of the allocation, whichever node asks.
    """
    return (
        "#!/bin/sh\n"
        "# Made by `tmover submit --headless`: job steps that a node starts are its own.\n"
        f'exec {shlex.quote(command)} --nodelist="$SLURMD_NODENAME" --nodes=1 --ntasks=1 '
        '--overlap "$@"\n'
    )


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what a job is submitted with, of the environment `tmover submit` runs in."""
    return {name: value for name, value in scrubbed(environ).items() if name not in _PER_JOB}


def log_glob(pattern: str, *, cwd: str, name: str, job: str, user: str) -> str:
    """Return which files srun or sbatch write for `pattern`, what differs by node being a `*`.

    >>> log_glob("%x.%j.%N.log", cwd="/home/ann", name="train", job="7", user="ann")
    '/home/ann/train.7.*.log'
    """
    known = {"x": name, "j": job, "A": job, "u": user, "%": "%"}
    filled = re.sub(r"%\d*(.)", lambda found: known.get(found[1], "*"), pattern)
    return str(pathlib.PurePosixPath(cwd) / filled)


# --- its standbys ---------------------------------------------------------------------------------


def tag(job: str) -> str:
    """Return the comment by which the standbys of a job are known in Slurm.

    >>> tag("slurm7")
    'tmover:slurm7'
    """
    return f"tmover:{job}"


def standby_base(options: Iterable[Option], nnodes: int) -> list[str]:
    """Return what of the job's options a standby has as well: `SlurmSpec.options`."""
    options = merged(options)
    kept = without(options, {*_OWN, *_WHOLE_JOB.split()})
    gpus = last(options, "gpus")
    if gpus is not None and last(options, "gpus-per-node") is None:
        kept.append(Option("gpus-per-node", _share(gpus, nnodes)))
    if (tasks := tasks_per_node(options)) > 1:  # as much of a node as the job has
        kept.append(Option("ntasks-per-node", str(tasks)))
    for name in ("output", "error"):
        path = last(kept, name)
        if path is not None and path != "/dev/null" and _JOB_ID.search(path) is None:
            kept = merged(kept, [Option(name, f"{path}.standby-%j")])  # not into the job's file
    return [str(option) for option in kept]


def standby_options(
    spec_options: Sequence[str],
    standby: StandbyConfig,
    job: str,
    name: str,
    exclude: Sequence[str] = (),
) -> list[str]:
    """Return sbatch's options for one standby of `job`, Slurm's name of which is `name`.

    `spec_options` is `SlurmSpec.options`; `exclude` are nodes that cannot stand by for this job.
    """
    base, _ = sbatch.read(spec_options)
    tasks = last(base, "ntasks-per-node") or "1"
    own = [
        Option("nodes", "1"),
        Option("ntasks", tasks),
        Option("ntasks-per-node", tasks),
        Option("no-kill", "off"),
        Option("no-requeue"),
        Option("job-name", f"{name}-standby"),
        Option("comment", tag(job)),
    ]
    asked = [
        Option(key, value)
        for key in ("partition", "reservation", "qos", "prefer")
        if (value := getattr(standby, key))
    ]
    excluded = [*exclude, *filter(None, [last(base, "exclude")])]
    if excluded:
        own.append(Option("exclude", ",".join(excluded)))
    export = _export(last(base, "export"), _PASSED_TO_STANDBY)
    user = without(merged(base, asked), {option.name for option in own} | {"export"})
    return [*map(str, own), export, *map(str, user)]


def standby_environment(env: Mapping[str, str], *, state: str, job: str) -> dict[str, str]:
    """Return what a standby of `job` is submitted with; `env` is `SlurmSpec.env`."""
    return {
        **environment(env), "TMOVER_STATE": state, "TMOVER_ROLE": "standby", "TMOVER_JOB": job,
    }  # fmt: skip


def standby_script(text: str) -> str:
    r"""Return the job's script for a standby: what its `#SBATCH` lines ask for is not asked again.

    >>> standby_script("#!/bin/sh\n#SBATCH --hold\ntrue\n")
    '#!/bin/sh\n##SBATCH --hold\ntrue\n'
    """
    asking = {number for number, _ in directives(text)}
    lines = text.splitlines(keepends=True)
    return "".join("#" + line if n in asking else line for n, line in enumerate(lines, start=1))


# --- inside ---------------------------------------------------------------------------------------


def _export(asked: str | None, names: Sequence[str]) -> str:
    """Return `--export` such that the variables of tmover are among what is exported."""
    words = [word for word in (asked or "ALL").split(",") if word]
    if "ALL" in words:
        return "--export=" + ",".join(words)
    if words in (["NONE"], ["NIL"]):
        words = []  # a list has Slurm make the user's environment anew, as NONE does
    return "--export=" + ",".join([*words, *(name for name in names if name not in words)])


def _share(gpus: str, nnodes: int) -> str:
    """Return a node's part of the GPUs of a whole job: `a100:32` of 4 nodes is `a100:8`."""
    parts = []
    for part in gpus.split(","):
        kind, colon, number = part.rpartition(":")
        each = str(-(-int(number) // max(1, nnodes))) if number.isdigit() else number
        parts.append(f"{kind}{colon}{each}")
    return ",".join(parts)
