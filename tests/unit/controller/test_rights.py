"""What the users of a controller may say and see."""

from __future__ import annotations

import typing

import msgspec
import pytest

from tmover import wire
from tmover.config import ControllerConfig
from tmover.controller.desk import Ledger
from tmover.controller.rights import Rights, act_of, without_details
from tmover.core.authority import Act
from tmover.core.events import Record
from tmover.core.roster import Job
from tmover.errors import Refused

JOBS = {
    name: Ledger(Job(name=name, owner=owner))
    for name, owner in {"slurm7": "ann", "slurm8": "bob", "1": "root"}.items()
}
TABLE = ControllerConfig(operators=("olga",))
RIGHTS = Rights(TABLE, JOBS)
OPEN = Rights(msgspec.structs.replace(TABLE, private=False), JOBS)
SPEC = wire.SlurmSpec(id=9, name="gpt", script="", cwd="/")
KINDS: tuple[type[wire.ToController], ...] = typing.get_args(wire.ToController)
OF_A_JOB = [kind for kind in KINDS if kind is not wire.SubmitRequest]
EVENTS = [kind for kind in OF_A_JOB if issubclass(kind, Record)]
REQUESTS = [kind for kind in OF_A_JOB if not issubclass(kind, Record)]


def message(kind: type[wire.ToController], job: str | None) -> wire.ToController:
    """Return a message of a kind about a job, with whatever else it needs."""
    values: dict[str, object] = {"job": job}
    for field in msgspec.structs.fields(kind):
        if field.required and field.name != "job":
            values[field.name] = _example(field.type)
    return msgspec.convert({**values, "type": kind.__name__}, kind)


def _example(kind: object) -> object:
    origin = typing.get_origin(kind) or kind
    if origin in (str, int, bool, bytes):
        return origin()
    if isinstance(origin, type) and issubclass(origin, dict):
        return {}
    if origin is typing.Union or type(None) in typing.get_args(kind):
        return None
    return ()


def _submission(owner: str, slurm: wire.SlurmSpec | None) -> wire.SubmitRequest:
    return wire.SubmitRequest(nnodes=1, nproc=1, owner=owner, slurm=slurm)


def test_every_message_there_is_names_a_job_or_is_a_submission() -> None:
    assert {wire.Heartbeat, wire.Program} <= set(EVENTS)
    assert wire.StatusRequest in REQUESTS
    for kind in OF_A_JOB:
        assert issubclass(kind, Record | wire.Request)
        assert "job" in kind.__struct_fields__


@pytest.mark.parametrize("kind", EVENTS)
def test_whatever_an_agent_says_it_says_as_an_agent(kind: type[wire.ToController]) -> None:
    assert act_of(message(kind, "slurm7")) is Act.SPEAK


@pytest.mark.parametrize("kind", OF_A_JOB)
def test_a_user_speaks_for_the_user_s_own_jobs(kind: type[wire.ToController]) -> None:
    RIGHTS.check("ann", message(kind, "slurm7"))


@pytest.mark.parametrize("kind", OF_A_JOB)
@pytest.mark.parametrize("job", ["slurm8", "1", "slurm9"])
def test_another_s_job_and_none_at_all_are_refused_alike(
    kind: type[wire.ToController], job: str
) -> None:
    said = message(kind, job)
    if job not in JOBS and isinstance(said, Record):
        RIGHTS.check("ann", said)  # refused where it is handled, in the same words
        return
    with pytest.raises(Refused, match=rf"^there is no job {job} here$"):
        RIGHTS.check("ann", said)


@pytest.mark.parametrize("kind", REQUESTS)
def test_another_s_job_is_not_found_by_slurm_s_number_either(
    kind: type[wire.ToController],
) -> None:
    with pytest.raises(Refused, match=r"^there is no job 8 here$"):
        RIGHTS.check("ann", message(kind, "8"))
    RIGHTS.check("ann", message(kind, "7"))


@pytest.mark.parametrize("kind", REQUESTS)
def test_an_operator_looks_after_all_jobs(kind: type[wire.ToController]) -> None:
    for job in JOBS:
        RIGHTS.check("olga", message(kind, job))


@pytest.mark.parametrize("kind", EVENTS)
def test_an_operator_is_no_agent_of_another_s_job(kind: type[wire.ToController]) -> None:
    with pytest.raises(Refused, match=r"^olga may not do that to job slurm7: speak as an agent"):
        RIGHTS.check("olga", message(kind, "slurm7"))


@pytest.mark.parametrize("user", ["", "root"])
@pytest.mark.parametrize("kind", OF_A_JOB)
def test_root_and_who_runs_the_controller_may_all(kind: type[wire.ToController], user: str) -> None:
    for job in JOBS:
        RIGHTS.check(user, message(kind, job))


@pytest.mark.parametrize("kind", REQUESTS)
def test_who_names_no_job_means_an_own_one(kind: type[wire.ToController]) -> None:
    RIGHTS.check("ann", message(kind, None))
    assert RIGHTS.meant("ann", None) == "slurm7"
    for user in ("eve", "olga"):
        with pytest.raises(Refused, match=r"^no job runs here$"):
            RIGHTS.meant(user, None)
    with pytest.raises(Refused, match=r"^several jobs run here"):
        RIGHTS.meant("root", None)


def test_a_user_submits_jobs_of_slurm_in_the_user_s_own_name() -> None:
    for user in ("ann", "olga"):
        RIGHTS.check(user, _submission(user, SPEC))
        for request in (_submission("bob", SPEC), _submission(user, None), _submission("", SPEC)):
            with pytest.raises(Refused, match=rf"^{user} may only submit jobs of Slurm, and for "):
                RIGHTS.check(user, request)
    for user in ("", "root"):
        RIGHTS.check(user, _submission("bob", SPEC))
        RIGHTS.check(user, _submission("root", None))


def test_where_it_is_not_private_jobs_are_seen_and_nothing_else() -> None:
    assert list(RIGHTS.visible("ann")) == ["slurm7"]
    assert list(OPEN.visible("ann")) == list(JOBS)
    assert [name for name in JOBS if OPEN.sees("ann", name)] == ["slurm7"]
    OPEN.check("ann", wire.StatusRequest(job="8"))
    for said in (
        wire.CancelRequest(job="8", reason=""),
        wire.Heartbeat(job="slurm8", agent="node1-1"),
    ):
        with pytest.raises(Refused, match=r"^ann may not do that to job slurm8: "):
            OPEN.check("ann", said)


def test_what_everybody_sees_says_nothing_of_how_a_job_is() -> None:
    kept = {"job", "owner", "phase", "epoch", "world_size", "code"}
    full = {
        f.name: f"secret {f.name}" if f.type == "str" else (f"secret {f.name}",)
        for f in msgspec.structs.fields(wire.JobStatus)
        if f.name not in kept
    }
    status = wire.JobStatus(
        **{**full, "job": "7", "owner": "ann", "phase": "training", "epoch": 3, "world_size": 8},  # type: ignore[arg-type]
    )

    shown = without_details(status)

    assert "secret" not in repr(shown)
    assert (shown.job, shown.owner, shown.phase, shown.epoch) == ("7", "ann", "training", 3)
