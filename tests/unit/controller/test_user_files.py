"""The users of a controller for the whole cluster: their directories and keys."""

from __future__ import annotations

import os
import pathlib
import pwd

import pytest

from tmover.controller import keys
from tmover.controller.users import Users
from tmover.errors import ConfigError

ME = pwd.getpwuid(os.geteuid()).pw_name
OTHER = "nobody"
is_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")


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
