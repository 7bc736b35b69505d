"""What the users of a controller may say and see: `core.authority`, applied to messages."""

from __future__ import annotations

from collections.abc import Mapping

from typing_extensions import assert_never

from tmover import wire
from tmover.config import ControllerConfig
from tmover.controller import requests
from tmover.controller.desk import Ledger
from tmover.controller.keyring import STRANGER
from tmover.core.authority import Act, Role, may, role
from tmover.core.events import Record
from tmover.errors import Refused


class Rights:
    """Knows the jobs of a controller, and who may do what with them."""

    def __init__(self, table: ControllerConfig, ledgers: Mapping[str, Ledger]) -> None:
        self._table = table
        self._ledgers = ledgers

    def check(self, user: str, message: wire.ToController) -> None:
        """Raise `Refused` unless `user` may say this.

        Of a job that the user may not know of, the answer is that of one that is not there.
        """
        if user == STRANGER:
            msg = "this key is not known any more: connect anew"
            raise Refused(msg)
        if isinstance(message, wire.SubmitRequest):
            self._check_submission(user, message)
            return
        if message.job is None:
            return  # then one of the user's own is meant, see `meant`
        if isinstance(message, Record):
            name = message.job
        else:
            name = requests.choose(self._ledgers, message.job)
        if name not in self._ledgers:
            return  # which is said where the message is handled
        act = act_of(message)
        if not self._may(user, name, act):
            seen = self._may(user, name, Act.EXISTS)
            raise Refused(_not_allowed(user, act, name) if seen else requests.unknown(message.job))

    def meant(self, user: str, job: str | None) -> str:
        """Return the job meant by a request that was checked. Raises `Refused`."""
        return requests.choose(self._own(user) if job is None else self._ledgers, job)

    def visible(self, user: str) -> dict[str, Ledger]:
        """Return the jobs that the user may know of, oldest first."""
        return {n: led for n, led in self._ledgers.items() if self._may(user, n, Act.EXISTS)}

    def sees(self, user: str, job: str) -> bool:
        """Return whether the user may see all of a job."""
        return self._may(user, job, Act.DETAILS)

    def must_vouch(self, user: str, message: wire.ToController) -> bool:
        """Return whether the scheduler is to say that what is submitted is the user's."""
        return (
            isinstance(message, wire.SubmitRequest)
            and message.slurm is not None
            and message.owner == user
            and not _is_administrator(user)
        )

    def _own(self, user: str) -> Mapping[str, Ledger]:
        if _is_administrator(user):
            return self._ledgers
        return {n: led for n, led in self._ledgers.items() if led.job.owner == user}

    def _may(self, user: str, job: str, act: Act) -> bool:
        owner = self._ledgers[job].job.owner
        return may(role(user, owner, self._table.operators), act, private=self._table.private)

    def _check_submission(self, user: str, request: wire.SubmitRequest) -> None:
        to_it = role(user, request.owner, self._table.operators)
        acts = {Act.SUBMIT if request.owner == user else Act.SUBMIT_FOR}
        if request.slurm is None:
            acts.add(Act.SUBMIT_LOCAL)
        if not all(may(to_it, act) for act in acts):
            msg = f"{user} may only submit jobs of Slurm, and for {user}"
            raise Refused(msg)


def act_of(message: wire.ToController) -> Act:
    """Return what somebody does who says this of a job that is there."""
    match message:
        case wire.StatusRequest():
            return Act.EXISTS  # what is shown of it is for `sees`
        case wire.MoveRequest():
            return Act.MOVE
        case wire.ReadyRequest():
            return Act.READY
        case wire.CancelRequest():
            return Act.CANCEL
        case wire.SubmitRequest():
            return Act.SUBMIT
        case Record():
            return Act.SPEAK
        case _:
            assert_never(message)


def without_details(status: wire.JobStatus) -> wire.JobStatus:
    """Return what everybody may see of a job where `private` is off: no names, paths or reasons."""
    return wire.JobStatus(
        job=status.job, owner=status.owner, phase=status.phase, epoch=status.epoch, step=None,
        world_size=status.world_size, slots=(), standbys=(), move=None, notes=(), outcome="",
        code=status.code,
    )  # fmt: skip


def _is_administrator(user: str) -> bool:
    return role(user, "", ()) is Role.ADMINISTRATOR


def _not_allowed(user: str, act: Act, job: str) -> str:
    return f"{user} may not do that to job {job}: {act.value}"
