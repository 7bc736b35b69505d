"""What Slurm's commands say when they do not do what was asked, and what that means."""

from __future__ import annotations

import re

from tmover.errors import ResizeRefused, SchedulerError, SlurmDenied, SlurmRefused, SlurmUnreachable
from tmover.scheduler.slurm.run import Command, Completed

_UNREACHABLE = re.compile(
    r"Unable to contact slurm controller|Zero Bytes were transmitted or received"
    r"|Socket timed out on send/recv|Connection refused|Unable to establish configuration source"
    r"|in standby mode|Could not resolve hostname|Slurm temporarily unable to accept job",
    re.IGNORECASE,
)
_DENIED = re.compile(
    r"Access/permission denied|Invalid user id|Permission denied|only permitted by root"
    r"|Invalid account or account/partition combination|Protocol authentication error",
    re.IGNORECASE,
)
_SEPARATOR = re.compile(r"#[0-9a-f]{24}#")
"""Made anew for each call: two errors about the same would differ by it."""
_INDEX = "the DB index is being set"
_NO_SUCH_NODE = "Invalid node name specified"
_ADVICE = {
    "Invalid partition name": "`sinfo -s` lists the partitions",
    "invalid partition": "`sinfo -s` lists the partitions",
    "Requested reservation is invalid": "`scontrol show res` lists the reservations",
    "Requested node configuration is not available": "no node that may be used has what is asked"
    " for: `sinfo -N -l` lists the nodes, `squeue` who has them",
    "Job has already finished": "nothing is left to do for it",
    "Invalid job id specified": "it ended some time ago, or was never there: `squeue -t all`",
    "Invalid node name specified": "`sinfo -N` lists the nodes",
}


def refusal(command: Command, completed: Completed) -> SchedulerError:
    """Return the error that a command which failed stands for."""
    if completed.timed_out:
        return unreachable(command, f"no answer within {command.timeout_s:g} s, and it was ended")
    words = said(completed)
    if _UNREACHABLE.search(words):
        return unreachable(command, words)
    if _DENIED.search(words):
        is_node = any(word.startswith("NodeName=") for word in command.argv)
        who = "ask an administrator" if is_node else "ask an administrator, or the job's owner"
        return SlurmDenied(_line(command, words, who))
    found = [advice for text, advice in _ADVICE.items() if text in words]
    return SlurmRefused(_line(command, words, *found[:1]))


def resize_refusal(command: Command, completed: Completed) -> SchedulerError:
    """Return what a failed `scontrol update JobId= NodeList=` stands for."""
    error, words = refusal(command, completed), said(completed)
    if not isinstance(error, SlurmRefused):
        return error
    if _INDEX in words:
        why = (
            "without slurmdbd, Slurm older than 24.11 resizes or updates a job once only: "
            "the nodes stay in the job until it ends"
        )
        return ResizeRefused(_line(command, words, why), is_final=True)
    if _NO_SUCH_NODE in words:
        why = (
            "Slurm does not take the batch host, nor a node that is not there, out of a job: "
            "it stays in the job until that ends; `tmover submit --headless` jobs have none"
        )
        return ResizeRefused(_line(command, words, why), is_final=True)
    if "disabled" in words or "not supported" in words:
        why = "this cluster forbids it (disable_job_shrink): the nodes stay until the job ends"
        return ResizeRefused(_line(command, words, why), is_final=True)
    return ResizeRefused(str(error), is_final=False)


def unreachable(command: Command, words: str) -> SlurmUnreachable:
    """Return the error for a slurmctld that does not answer."""
    return SlurmUnreachable(
        _line(command, words, "nothing is known until slurmctld answers: `scontrol ping`")
    )


def said(completed: Completed) -> str:
    """Return Slurm's own words, on one line."""
    text = completed.err if completed.err.strip() else completed.out
    lines = dict.fromkeys(line.strip() for line in text.splitlines())
    words = "; ".join(line for line in lines if line and not line.startswith("*"))
    return words[:500] or f"exit code {completed.code}, without a word"


def _line(command: Command, words: str, *advice: str) -> str:
    whose = f"as {command.user}, " if command.user else ""
    shown = _SEPARATOR.sub("", str(command))
    shown = shown if len(shown) <= 200 else f"{shown[:200]}..."
    return "; ".join([f"{whose}`{shown}`: {words}", *advice])
