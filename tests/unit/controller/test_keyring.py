"""Keys that are let in: the fixed ones and those that were introduced."""

from __future__ import annotations

import pathlib
import stat

import pytest

from tmover.controller.keyring import STRANGER, Keyring

OURS = b"o" * 40


def key(number: int) -> bytes:
    return b"%040d" % number


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "introduced.jsonl"


def test_a_key_is_known_from_when_it_is_introduced(path: pathlib.Path) -> None:
    ring = Keyring({OURS: ""}, path)
    assert (OURS in ring, ring[OURS], key(1) in ring) == (True, "", False)

    ring.introduce(key(1), "ann")

    assert key(1) in ring
    assert ring[key(1)] == "ann"


def test_another_controller_knows_it_at_once_and_nobody_else_can_read_it(
    path: pathlib.Path,
) -> None:
    before = Keyring({}, path)
    before.introduce(key(1), "ann")
    before.introduce(key(2), "bob")

    after = Keyring({}, path)

    assert (after[key(1)], after[key(2)], len(after)) == ("ann", "bob", 2)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_of_one_user_s_keys_the_one_that_was_not_used_for_longest_is_forgotten(
    path: pathlib.Path,
) -> None:
    ring = Keyring({}, path, per_user=2)
    ring.introduce(key(9), "bob")
    ring.introduce(key(1), "ann")
    ring.introduce(key(2), "ann")
    assert ring[key(1)] == "ann"

    ring.introduce(key(3), "ann")

    assert [number for number in (1, 2, 3, 9) if key(number) in ring] == [1, 3, 9]
    assert ring[key(2)] == STRANGER


def test_a_key_is_the_last_one_s_who_proved_to_hold_it_and_fixed_ones_nobody_else_s(
    path: pathlib.Path,
) -> None:
    ring = Keyring({OURS: ""}, path)
    ring.introduce(key(1), "ann")

    ring.introduce(key(1), "bob")
    ring.introduce(OURS, "bob")

    assert (ring[key(1)], ring[OURS], len(ring)) == ("bob", "", 1)
    assert Keyring({OURS: ""}, path)[key(1)] == "bob"


def test_who_is_not_served_any_more_has_no_key(path: pathlib.Path) -> None:
    Keyring({}, path).introduce(key(1), "ann")

    assert key(1) not in Keyring({}, path, serves=lambda user: user == "bob")


def test_old_keys_are_introduced_again(path: pathlib.Path) -> None:
    Keyring({}, path, now=lambda: 0.0).introduce(key(1), "ann")

    assert key(1) in Keyring({}, path, now=lambda: 29 * 86400.0)
    assert key(1) not in Keyring({}, path, now=lambda: 31 * 86400.0)


def test_the_file_does_not_grow_for_ever(path: pathlib.Path) -> None:
    ring = Keyring({}, path, per_user=3)
    for number in range(5000):
        ring.introduce(key(number), "ann")

    assert len(path.read_bytes().splitlines()) < 1100
    assert [n for n in range(5000) if key(n) in Keyring({}, path)][-3:] == [4997, 4998, 4999]


@pytest.mark.parametrize("damage", [b"rubbish\n", b"\xff\xfe\n", b'{"key": 3}\n', b'{"key": "'])
def test_damage_costs_an_introduction_and_nothing_else(path: pathlib.Path, damage: bytes) -> None:
    Keyring({}, path).introduce(key(1), "ann")
    path.write_bytes(damage + path.read_bytes() if damage.endswith(b"\n") else damage)

    ring = Keyring({}, path)

    assert (key(1) in ring) == damage.endswith(b"\n")
    ring.introduce(key(2), "ann")
    assert key(2) in ring
