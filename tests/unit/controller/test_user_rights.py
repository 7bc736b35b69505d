"""The users of a controller for the whole cluster: their keys, and what each may say."""

from __future__ import annotations

import getpass
import os
import pathlib
import pwd
import typing

import msgspec
import pytest

from tmover import wire
from tmover.controller import keys, users
from tmover.controller.users import Users
from tmover.core.events import Record
from tmover.errors import ConfigError, Refused

ME = pwd.getpwuid(os.geteuid()).pw_name
OTHER = "nobody"
is_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
OWNERS = {"slurm7": "ann", "slurm8": "bob", "1": "root"}
SPEC = wire.SlurmSpec(id=9, name="gpt", script="", cwd="/")


@pytest.fixture
def state(tmp_path: pathlib.Path) -> pathlib.Path:
    return keys.private_directory(tmp_path / "state")


@pytest.fixture
def server(state: pathlib.Path) -> keys.Keypair:
    if os.geteuid() != 0:
        pytest.skip("only root can serve others")
    return keys.make(state)[0]


def mode(path: pathlib.Path) -> int:
    return path.stat().st_mode & 0o777


# --- directories and keys -------------------------------------------------------------------------


@is_root
def test_a_user_s_keys_are_the_user_s_alone_in_a_directory_that_is_not(
    state: pathlib.Path, server: keys.Keypair
) -> None:
    uid = pwd.getpwnam(OTHER).pw_uid

    made = Users(state, [OTHER], server)

    home = state / "users" / OTHER
    for file in (home / "keys" / "client.key", home / "keys" / "server.pub"):
        assert (mode(file), file.stat().st_uid) == (0o600, uid)
    for directory in (state, home.parent, home, home / "keys"):
        assert (mode(directory), directory.stat().st_uid) == (0o711, 0)
    found = keys.read_client(home)
    assert found.server == server.public
    assert made.keys == {found.own.public: OTHER}


def test_what_is_the_controller_s_own_stays_closed(
    state: pathlib.Path, server: keys.Keypair
) -> None:
    Users(state, [ME], server)

    assert mode(state / "keys") == 0o700
    assert mode(state / "keys" / "client.key") == 0o600


def test_keys_are_kept_and_every_user_has_another_one(
    state: pathlib.Path, server: keys.Keypair
) -> None:
    names = [ME, OTHER] if os.geteuid() == 0 else [ME]
    before = Users(state, names, server).keys

    assert Users(state, names, server).keys == before
    assert sorted(before.values()) == sorted(names)
    assert keys.read_client(state).own.public not in before


def test_a_stranger_s_name_is_an_error_and_makes_nothing(
    state: pathlib.Path, server: keys.Keypair
) -> None:
    with pytest.raises(ConfigError, match=r"no user '\.\./no-one' on this machine"):
        Users(state, ["../no-one"], server)

    assert not (state / "users").exists()


def test_a_directory_that_cannot_be_made_is_named(
    state: pathlib.Path, server: keys.Keypair
) -> None:
    (state / "users").touch()

    with pytest.raises(ConfigError, match=r"^cannot use .*/state/users: file exists$"):
        Users(state, [ME], server)


def test_what_is_announced_is_withdrawn_again(state: pathlib.Path, server: keys.Keypair) -> None:
    made = Users(state, [ME], server)
    file = state / "users" / ME / "controller.json"

    made.announce("controller.json", b"{}")
    assert (file.read_bytes(), mode(file)) == (b"{}", 0o600)
    made.withdraw("controller.json", b"{}")
    made.withdraw("controller.json", b"{}")

    assert not file.exists()


# --- what a user may say --------------------------------------------------------------------------

KINDS: tuple[type[wire.ToController], ...] = typing.get_args(wire.ToController)
OF_A_JOB = [kind for kind in KINDS if kind is not wire.SubmitRequest]


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


def test_every_message_there_is_names_a_job_or_is_a_submission() -> None:
    assert wire.Heartbeat in KINDS
    assert wire.StatusRequest in KINDS
    for kind in OF_A_JOB:
        assert issubclass(kind, Record | wire.Request)
        assert "job" in kind.__struct_fields__


@pytest.mark.parametrize("kind", OF_A_JOB)
def test_a_user_speaks_for_the_user_s_own_jobs(kind: type[wire.ToController]) -> None:
    users.check("ann", message(kind, "slurm7"), OWNERS.get)


@pytest.mark.parametrize("kind", OF_A_JOB)
@pytest.mark.parametrize("job", ["slurm8", "1"])
def test_a_user_speaks_for_no_other_job(kind: type[wire.ToController], job: str) -> None:
    with pytest.raises(Refused, match=f"^job {job} is not ann's$"):
        users.check("ann", message(kind, job), OWNERS.get)


@pytest.mark.parametrize("kind", OF_A_JOB)
def test_a_job_that_nobody_knows_is_nobody_s(kind: type[wire.ToController]) -> None:
    users.check("ann", message(kind, "slurm9"), OWNERS.get)


@pytest.mark.parametrize("kind", [k for k in OF_A_JOB if issubclass(k, wire.Request)])
def test_who_names_no_job_means_an_own_one(kind: type[wire.ToController]) -> None:
    users.check("ann", message(kind, None), OWNERS.get)  # `Desk.of` is what is chosen from


@pytest.mark.parametrize("kind", OF_A_JOB)
def test_who_runs_the_controller_speaks_for_all(kind: type[wire.ToController]) -> None:
    for job in OWNERS:
        users.check("", message(kind, job), OWNERS.get)


def test_a_user_submits_jobs_of_slurm_in_the_user_s_own_name() -> None:
    users.check("ann", _submission("ann", SPEC), OWNERS.get)

    for request in (_submission("bob", SPEC), _submission("ann", None), _submission("", SPEC)):
        with pytest.raises(Refused, match=r"^ann may only submit jobs of Slurm, and for ann$"):
            users.check("ann", request, OWNERS.get)


def test_who_runs_the_controller_submits_whatever_there_is() -> None:
    users.check("", _submission("bob", SPEC), OWNERS.get)
    users.check("", _submission(getpass.getuser(), None), OWNERS.get)


def _submission(owner: str, slurm: wire.SlurmSpec | None) -> wire.SubmitRequest:
    return wire.SubmitRequest(nnodes=1, nproc=1, owner=owner, slurm=slurm)
