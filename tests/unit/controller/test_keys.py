"""Keys and secrets: made once, readable by their owner only, and damage is one clear line."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator

import pytest

from tmover.controller import keys
from tmover.errors import ConfigError


def test_keys_are_made_once(tmp_path: pathlib.Path) -> None:
    server, client = keys.make(tmp_path)

    assert keys.make(tmp_path) == (server, client)
    assert keys.read_client(tmp_path) == keys.ClientKeys(server=server.public, own=client)
    assert server != client


def test_only_their_owner_can_read_them(tmp_path: pathlib.Path) -> None:
    keys.make(tmp_path)
    keys.make_secret(tmp_path, "1")

    for directory in ("keys", "secrets"):
        assert (tmp_path / directory).stat().st_mode & 0o777 == 0o700
        for path in (tmp_path / directory).iterdir():
            assert path.stat().st_mode & 0o777 == 0o600


def test_no_half_written_file_is_left(tmp_path: pathlib.Path) -> None:
    keys.make(tmp_path)

    names = sorted(path.name for path in (tmp_path / "keys").iterdir())
    assert names == ["client.key", "server.key", "server.pub"]


def test_each_job_has_a_secret_of_its_own(tmp_path: pathlib.Path) -> None:
    keys.make_secret(tmp_path, "1")
    keys.make_secret(tmp_path, "2")

    first = keys.read_secret(tmp_path, "1")
    assert len(first) == keys.SECRET_BYTES
    assert first == keys.read_secret(tmp_path, "1") != keys.read_secret(tmp_path, "2")


def test_a_public_key_that_went_astray_is_written_again(tmp_path: pathlib.Path) -> None:
    server, _ = keys.make(tmp_path)
    (tmp_path / "keys" / "server.pub").unlink()

    assert keys.make(tmp_path)[0] == server
    assert keys.read_client(tmp_path).server == server.public


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (b"", "does not hold 2 CURVE key"),
        (b"x" * 40 + b"\n", "does not hold 2 CURVE key"),
        (b"x" * 40 + b"\n" + b"\xff" * 40, "does not hold 2 CURVE key"),
        (b"x" * 40 + b"\n" + b"y" * 40, "its halves do not belong together"),
        (b"x" * 40 + b"\n" + b"#" * 40, "its halves do not belong together"),
    ],
)
def test_a_damaged_key_is_named(tmp_path: pathlib.Path, damage: bytes, complaint: str) -> None:
    keys.make(tmp_path)
    (tmp_path / "keys" / "client.key").write_bytes(damage)

    with pytest.raises(ConfigError, match=f"client.key is damaged: .*{complaint}"):
        keys.read_client(tmp_path)


def test_a_key_that_others_can_read_is_refused(tmp_path: pathlib.Path) -> None:
    keys.make(tmp_path)
    (tmp_path / "keys" / "client.key").chmod(0o640)

    with pytest.raises(ConfigError, match="can be read by others: `chmod 600 "):
        keys.read_client(tmp_path)


def test_a_missing_key_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the key file .*client.key: No such file"):
        keys.read_client(tmp_path)


def test_a_damaged_secret_is_named(tmp_path: pathlib.Path) -> None:
    keys.make_secret(tmp_path, "1")
    (tmp_path / "secrets" / "1").write_bytes(b"short")

    with pytest.raises(ConfigError, match="holds 5 bytes"):
        keys.read_secret(tmp_path, "1")


def test_a_secret_key_does_not_show_in_a_log() -> None:
    assert "hush" not in repr(keys.Keypair(public=b"shown", secret=b"hush"))


def test_a_directory_that_was_there_keeps_its_mode(tmp_path: pathlib.Path) -> None:
    tmp_path.chmod(0o755)

    assert keys.private_directory(tmp_path) == tmp_path

    assert tmp_path.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("mode", [0o1777, 0o770])
def test_a_directory_that_others_can_write_is_refused(tmp_path: pathlib.Path, mode: int) -> None:
    tmp_path.chmod(mode)

    with pytest.raises(ConfigError, match=f"others can write to the directory {tmp_path}"):
        keys.private_directory(tmp_path)

    assert tmp_path.stat().st_mode & 0o7777 == mode


def test_a_directory_that_is_made_is_its_owner_s_alone(tmp_path: pathlib.Path) -> None:
    made = keys.private_directory(tmp_path / "a" / "b")

    assert made.stat().st_mode & 0o777 == 0o700


def test_keys_that_cannot_be_looked_for_are_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys.make(tmp_path)
    (tmp_path / "keys").chmod(0o000)
    tmp_path.chmod(0o711)
    monkeypatch.chdir(tmp_path)

    with nobody_special(), pytest.raises(ConfigError, match=r"keys/server.key: permission denied"):
        keys.make(pathlib.Path())

    (tmp_path / "keys").chmod(0o700)


@contextlib.contextmanager
def nobody_special() -> Iterator[None]:
    """Have root stand before closed doors, too."""
    me = os.geteuid()
    os.seteuid(65534 if me == 0 else me)
    try:
        yield
    finally:
        os.seteuid(me)
