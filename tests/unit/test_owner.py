"""Who this is, and whose a directory is."""

from __future__ import annotations

import os
import pathlib
import pwd

import pytest

from tmover.owner import is_anothers, user_name


def test_the_environment_does_not_say_who_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(variable, "ann")

    assert user_name() == pwd.getpwuid(os.geteuid()).pw_name


def test_what_is_ours_or_can_be_made_is_nobody_else_s(tmp_path: pathlib.Path) -> None:
    assert not is_anothers(tmp_path)
    assert not is_anothers(tmp_path / "users" / "ann" / "state")
