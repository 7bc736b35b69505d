"""The states of Slurm's jobs and nodes, from 22.05 to 26.05. Reading one never fails.

>>> JobState.parse("RUNNING"), JobState.parse("CANCELLED by 1000"), JobState.parse("?")
(<JobState.RUNNING: 'RUNNING'>, <JobState.CANCELLED: 'CANCELLED'>, <JobState.UNKNOWN: 'UNKNOWN'>)
>>> node_state("ALLOCATED+DRAIN+NOT_RESPONDING"), node_state("mixed$")
(<NodeState.DRAINING: 'draining'>, <NodeState.ALLOCATED: 'allocated'>)
"""

from __future__ import annotations

import enum

from tmover.scheduler.interface import NodeState


class JobState(str, enum.Enum):
    """The state of a job, as `squeue` prints it."""

    PENDING = "PENDING"
    REQUEUED = "REQUEUED"
    REQUEUE_FED = "REQUEUE_FED"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    RESV_DEL_HOLD = "RESV_DEL_HOLD"
    SPECIAL_EXIT = "SPECIAL_EXIT"
    EXPEDITING = "EXPEDITING"

    CONFIGURING = "CONFIGURING"
    POWER_UP_NODE = "POWER_UP_NODE"
    RUNNING = "RUNNING"
    RESIZING = "RESIZING"
    SIGNALING = "SIGNALING"
    STOPPED = "STOPPED"
    SUSPENDED = "SUSPENDED"

    COMPLETING = "COMPLETING"
    STAGE_OUT = "STAGE_OUT"

    BOOT_FAIL = "BOOT_FAIL"
    CANCELLED = "CANCELLED"
    COMPLETED = "COMPLETED"
    DEADLINE = "DEADLINE"
    FAILED = "FAILED"
    LAUNCH_FAILED = "LAUNCH_FAILED"
    NODE_FAIL = "NODE_FAIL"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    PREEMPTED = "PREEMPTED"
    RECONFIG_FAIL = "RECONFIG_FAIL"
    REVOKED = "REVOKED"
    TIMEOUT = "TIMEOUT"

    UNKNOWN = "UNKNOWN"
    """A word this version does not know: neither running nor over."""

    @classmethod
    def parse(cls, text: str) -> JobState:
        """Return the state that the first word of `text` names, UNKNOWN if it names none."""
        word = (text.split() or [""])[0].upper().rstrip("+")
        return cls.__members__.get(word, cls.UNKNOWN)

    @property
    def is_pending(self) -> bool:
        """Whether the job waits for nodes, for the first time or again."""
        return self in _PENDING

    @property
    def is_running(self) -> bool:
        """Whether the job holds its nodes and may run job steps, now or after SIGCONT."""
        return self in _RUNNING

    @property
    def is_ending(self) -> bool:
        """Whether the job has ended and Slurm still cleans up behind it; it may be requeued."""
        return self in (JobState.COMPLETING, JobState.STAGE_OUT)

    @property
    def is_over(self) -> bool:
        """Whether the job has ended and will not run again by itself."""
        return self in _OVER


_PENDING = frozenset(
    {
        JobState.PENDING,
        JobState.REQUEUED,
        JobState.REQUEUE_FED,
        JobState.REQUEUE_HOLD,
        JobState.RESV_DEL_HOLD,
        JobState.SPECIAL_EXIT,
        JobState.EXPEDITING,
    }
)
_RUNNING = frozenset(
    {
        JobState.CONFIGURING,
        JobState.POWER_UP_NODE,
        JobState.RUNNING,
        JobState.RESIZING,
        JobState.SIGNALING,
        JobState.STOPPED,
        JobState.SUSPENDED,
    }
)
_OVER = frozenset(
    {
        JobState.BOOT_FAIL,
        JobState.CANCELLED,
        JobState.COMPLETED,
        JobState.DEADLINE,
        JobState.FAILED,
        JobState.LAUNCH_FAILED,
        JobState.NODE_FAIL,
        JobState.OUT_OF_MEMORY,
        JobState.PREEMPTED,
        JobState.RECONFIG_FAIL,
        JobState.REVOKED,
        JobState.TIMEOUT,
    }
)

_SUFFIXES = "*~#!%$@^-"
"""What `sinfo` appends to the one word it prints of a state."""
_SIGNS = {"@": "REBOOT_REQUESTED", "^": "REBOOT_ISSUED", "%": "POWERING_DOWN", "!": "POWER_DOWN"}
"""The suffixes that ask for the node."""

_FAILING = frozenset({"DOWN", "ERROR"})
_LEAVE = frozenset(
    {
        "DRAIN",
        "DRAINED",
        "DRAINING",
        "DRNG",
        "FAIL",
        "FAILING",
        "FAILG",
        "INVAL",
        "INVALID_REG",
        "POWER_DOWN",
        "POWERING_DOWN",
        "REBOOT",
        "REBOOT_ISSUED",
        "REBOOT_REQUESTED",
    }
)
_BUSY = frozenset({"ALLOCATED", "ALLOC", "MIXED", "MIX", "COMPLETING", "COMP"})
_BUSY_AND_LEAVING = frozenset({"DRAINING", "DRNG", "FAILING", "FAILG"})
_FREE = frozenset({"IDLE", "RESERVED", "RESV", "MAINT", "MAINTENANCE", "PLANNED", "PLND"})


def node_state(text: str) -> NodeState:
    """Return what a node's state, base and flags, means for the ranks on it.

    A node that is DOWN for Slurm does not answer `slurmctld`: what runs there may go on, hence
    FAILING and never `NodeState.DOWN`, which promises that nothing does. One that does not respond
    and is not DOWN yet stays usable: the ranks know better, and sooner.
    """
    words = _words(text)
    if words & _FAILING:
        return NodeState.FAILING
    is_busy = bool(words & (_BUSY | _BUSY_AND_LEAVING))
    if words & _LEAVE:
        return NodeState.DRAINING if is_busy else NodeState.DRAINED
    if is_busy:
        return NodeState.ALLOCATED
    return NodeState.IDLE if words & _FREE else NodeState.UNKNOWN


def _words(text: str) -> frozenset[str]:
    """Return base and flags in upper case, and what the suffixes stand for."""
    words: set[str] = set()
    for part in text.strip().upper().split("+"):
        word = part.rstrip(_SUFFIXES)
        words.add(word)
        words.update(flag for sign, flag in _SIGNS.items() if sign in part[len(word) :])
    return frozenset(words)
