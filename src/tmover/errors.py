"""Everything tmover raises on purpose.

TmoverError                     shown to the user as one line, with `exit_code`
├── ConfigError                 the user's file, flag or script is wrong; names what to change
│   ├── CallError               a collective is called wrongly; a `RuntimeError` too, like torch's
│   │   └── UnsupportedError    with tensors it cannot move; a `NotImplementedError` too
│   └── CallTypeError           with an argument of another type; a `TypeError` too
├── SchedulerError              Slurm or the local scheduler did not do what was asked
│   ├── SlurmUnreachable        slurmctld did not answer: nothing is known, asking again can help
│   ├── SlurmDenied             the user has no right to it
│   └── SlurmRefused            slurmctld said no; asking again will not help
│       └── ResizeRefused       it said no to giving nodes of a job back
├── ControllerUnavailable       no controller answers; asking again later can help
├── Refused                     the controller said no, and why
├── MungeError                  MUNGE did not say who somebody is
├── ProtocolError               a peer sent what this version cannot read
├── JournalError                the journal is damaged; names the line and the way out
├── Superseded                  another controller has taken this one's journals over: it ends
├── LinkError                   a link to another rank broke or could not be opened
├── StateError                  state that cannot be tracked, or that arrived damaged
└── Interrupted                 the attempt is over: raised inside `with step`, absorbed by it

Exit codes: 0 done, 1 failed, 2 usage or configuration, 3 scheduler, 4 no controller, 130
interrupted.
"""

from __future__ import annotations


class TmoverError(Exception):
    """Base of all errors a user can be shown without a traceback."""

    exit_code = 1


class ConfigError(TmoverError):
    """What the user wrote is wrong."""

    exit_code = 2


class CallError(ConfigError, RuntimeError):
    """A collective was called wrongly. A script that catches what torch raises catches this."""


class UnsupportedError(CallError, NotImplementedError):
    """A collective was called with tensors of a kind that it does not move."""


class CallTypeError(ConfigError, TypeError):
    """A collective was called with an argument of another type."""


class SchedulerError(TmoverError):
    """The scheduler did not do what was asked."""

    exit_code = 3


class SlurmUnreachable(SchedulerError):
    """Slurm did not answer: whether the job or node is there, or the order was obeyed, is open."""


class SlurmDenied(SchedulerError):
    """Slurm lets somebody else do that, not this user."""


class SlurmRefused(SchedulerError):
    """Slurm did not do what was asked, and said why."""


class ResizeRefused(SlurmRefused):
    """Slurm keeps nodes in a job that were to be given back; `is_final` for as long as it runs."""

    def __init__(self, message: str, *, is_final: bool) -> None:
        super().__init__(message)
        self.is_final = is_final


class ControllerUnavailable(TmoverError):
    """No controller answered in time."""

    exit_code = 4


class Refused(TmoverError):
    """The controller refused a request."""


class MungeError(TmoverError):
    """MUNGE did not make or read a credential."""

    exit_code = 4


class ProtocolError(TmoverError):
    """A peer's message could not be read, or cannot be meant."""


class JournalError(TmoverError):
    """The journal cannot be read."""


class Superseded(TmoverError):
    """Another controller works on this one's journals: it must end, and decide nothing more."""


class LinkError(TmoverError):
    """A link broke, or could not be opened. `peers` are the workers at its other end."""

    def __init__(self, message: str, peers: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.peers = peers


class StateError(TmoverError):
    """State cannot be captured, or arrived damaged."""


class Interrupted(TmoverError):
    """The current attempt will not be kept. Do not catch it inside `with step`."""
