"""Whom a controller for the whole cluster serves."""

from __future__ import annotations

import os
import pathlib
import pwd
import stat

import pytest

from tmover.controller import keys
from tmover.controller.users import Users
from tmover.errors import ConfigError

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can serve others")
FILE = "controller.json"


@NEEDS_ROOT
def test_each_user_has_a_key_that_the_user_alone_can_read(tmp_path: pathlib.Path) -> None:
    server, _ = keys.make(tmp_path)

    users = Users(tmp_path, ["nobody", "daemon"], server)
    users.announce(FILE, b"here")

    for name in ("nobody", "daemon"):
        known = keys.read_client(tmp_path / "users" / name)
        assert (known.server, users.keys[known.own.public]) == (server.public, name)
        for file in ("keys/client.key", "keys/server.pub", FILE):
            found = (tmp_path / "users" / name / file).stat()
            assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (pwd.getpwnam(name).pw_uid, 0o600)
    assert Users(tmp_path, ["daemon", "nobody"], server).keys == users.keys


@NEEDS_ROOT
def test_who_is_served_no_more_is_told_of_no_controller(tmp_path: pathlib.Path) -> None:
    server, _ = keys.make(tmp_path)
    Users(tmp_path, ["nobody", "daemon"], server).announce(FILE, b"here")

    now = Users(tmp_path, ["daemon"], server)
    now.announce(FILE, b"there")

    assert not (tmp_path / "users" / "nobody" / FILE).exists()
    assert (tmp_path / "users" / "daemon" / FILE).read_bytes() == b"there"
    now.withdraw(FILE, b"there")
    assert not (tmp_path / "users" / "daemon" / FILE).exists()


@NEEDS_ROOT
@pytest.mark.parametrize("spoilt", [b"", b"no key", b"x" * 5000])
def test_a_key_that_its_user_has_spoilt_is_made_anew(tmp_path: pathlib.Path, spoilt: bytes) -> None:
    server, _ = keys.make(tmp_path)
    before = Users(tmp_path, ["nobody"], server).keys
    path = tmp_path / "users" / "nobody" / "keys" / "client.key"
    path.write_bytes(spoilt)

    after = Users(tmp_path, ["nobody"], server).keys

    assert list(after.values()) == ["nobody"]
    assert after.keys() != before.keys()
    assert keys.read_client(tmp_path / "users" / "nobody").own.public in after


@NEEDS_ROOT
def test_with_a_stranger_among_the_users_nothing_is_made(tmp_path: pathlib.Path) -> None:
    server, _ = keys.make(tmp_path)

    with pytest.raises(ConfigError, match="there is no user 'no-such-user' on this machine"):
        Users(tmp_path, ["nobody", "no-such-user"], server)
    assert not (tmp_path / "users").exists()


@NEEDS_ROOT
def test_what_another_controller_has_announced_since_stays(tmp_path: pathlib.Path) -> None:
    server, _ = keys.make(tmp_path)
    made = Users(tmp_path, ["nobody"], server)
    made.announce(FILE, b"ours")
    Users(tmp_path, ["nobody"], server).announce(FILE, b"theirs")

    made.withdraw(FILE, b"ours")

    assert (tmp_path / "users" / "nobody" / FILE).read_bytes() == b"theirs"
