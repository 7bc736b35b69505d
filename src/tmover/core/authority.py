"""Who may do what with whose job: one table, which `docs/security.md` shows."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping

ROOT = "root"


class Role(str, enum.Enum):
    """What a user is to a job."""

    OWNER = "owner"
    """The job is the user's."""
    OPERATOR = "operator"
    """Named in `[controller] operators`."""
    ADMINISTRATOR = "administrator"
    """Root, and whoever runs the controller."""
    ANYONE = "anyone"
    """Any other user whom the controller knows."""


class Act(str, enum.Enum):
    """What can be asked of the controller."""

    EXISTS = "see that a job exists"
    DETAILS = "see its nodes, notes and reasons"
    SUBMIT = "submit in one's own name"
    SUBMIT_FOR = "submit in another's name"
    SUBMIT_LOCAL = "submit a job that is not Slurm's"
    MOVE = "move its ranks"
    READY = "say that a node may be used again"
    CANCEL = "cancel it"
    SPEAK = "speak as an agent of it"


_ALL = frozenset(Role)
_LOOKED_AFTER = frozenset({Role.OWNER, Role.OPERATOR, Role.ADMINISTRATOR})
_OWN = frozenset({Role.OWNER, Role.ADMINISTRATOR})
_ROOT_S = frozenset({Role.ADMINISTRATOR})

TABLE: Mapping[Act, frozenset[Role]] = {
    Act.EXISTS: _LOOKED_AFTER,
    Act.DETAILS: _LOOKED_AFTER,
    Act.SUBMIT: _ALL,
    Act.SUBMIT_FOR: _ROOT_S,  # standbys run its script as the owner
    Act.SUBMIT_LOCAL: _ROOT_S,  # it runs as whoever runs the controller
    Act.MOVE: _LOOKED_AFTER,
    Act.READY: _LOOKED_AFTER,
    Act.CANCEL: _LOOKED_AFTER,
    Act.SPEAK: _OWN,  # who speaks as an agent is told the job's secret
}


def role(user: str, owner: str, operators: Collection[str]) -> Role:
    """Return what a user is to the job of `owner`. "" is who runs the controller.

    >>> role("ann", "ann", ()).value, role("bob", "ann", ()).value, role("", "ann", ()).value
    ('owner', 'anyone', 'administrator')
    """
    if user in ("", ROOT):
        return Role.ADMINISTRATOR
    if user == owner:
        return Role.OWNER
    return Role.OPERATOR if user in operators else Role.ANYONE


def may(role: Role, act: Act, *, private: bool = True) -> bool:
    """Return whether one of `role` may do it; not `private`: everybody sees that jobs exist."""
    return role in TABLE[act] or (act is Act.EXISTS and not private)
