"""`tmover init`: what it makes, and that it changes nothing."""

from __future__ import annotations

import json
import os
import pathlib
import stat
import subprocess
import sys

import msgspec
import pytest

from tmover import config
from tmover.config import Config, load
from tmover.controller import keys
from tmover.errors import ConfigError


def init(home: pathlib.Path, *words: object) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TMOVER", "XDG"))}
    return subprocess.run(
        [sys.executable, "-m", "tmover", "init", *map(str, words)],
        env={**env, "HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def tree(home: pathlib.Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(home.rglob("*")) if p.is_file()}


def test_a_user_has_everything_made_once(tmp_path: pathlib.Path) -> None:
    first = init(tmp_path, "--json")
    made = tree(tmp_path)
    second = init(tmp_path, "--json")

    state = tmp_path / ".local" / "state" / "tmover"
    shown, again = json.loads(first.stdout), json.loads(second.stdout)
    assert shown["state"] == str(state)
    assert (shown["kept"], again["made"]) == ([], [])
    assert shown["made"] == again["kept"]
    assert tree(tmp_path) == made
    assert keys.read_client(state)
    assert stat.S_IMODE(state.stat().st_mode) == 0o700


def test_the_file_that_is_made_shows_every_key_and_sets_none(tmp_path: pathlib.Path) -> None:
    init(tmp_path)

    path = tmp_path / ".config" / "tmover" / "tmover.toml"
    assert load(path, {}) == Config()
    lines = [line.removeprefix("# ") for line in path.read_text().splitlines()[2:]]
    assert msgspec.toml.decode("\n".join(lines), type=Config) == Config()


def test_a_file_that_is_there_stays(tmp_path: pathlib.Path) -> None:
    path = tmp_path / ".config" / "tmover" / "tmover.toml"
    path.parent.mkdir(parents=True)
    path.write_text("[agent]\nretry_s = 3.0\n")

    ended = init(tmp_path)

    assert f"kept  {path}\n" in ended.stdout
    assert path.read_text() == "[agent]\nretry_s = 3.0\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="--site is for root")
def test_a_site_has_a_file_for_all_machines_and_one_for_the_head_node(
    tmp_path: pathlib.Path,
) -> None:
    words = (
        "--site",
        "--state",
        tmp_path / "cluster",
        "--config",
        tmp_path / "etc" / "tmover.toml",
    )
    ended = init(tmp_path, *words)
    assert ended.returncode == 0, ended.stderr

    everywhere = load(tmp_path / "etc" / "tmover.toml", {})
    head = load(tmp_path / "etc" / "controller.toml", {})
    assert everywhere.controller.state == head.controller.state == str(tmp_path / "cluster")
    assert head.controller.bind.startswith("tcp://")
    assert "systemctl enable --now tmover" in ended.stdout
    assert "kept" not in ended.stdout
    assert "made" not in init(tmp_path, *words).stdout


# --- the user's own file --------------------------------------------------------------------------


def own(home: pathlib.Path, text: str) -> pathlib.Path:
    path = home / "tmover" / "tmover.toml"
    path.parent.mkdir()
    path.write_text(text)
    return path


def test_a_user_s_own_file_is_read_and_goes_after_the_environment(tmp_path: pathlib.Path) -> None:
    own(tmp_path, "[agent]\nretry_s = 3.0\nstop_s = 7.0\n")
    environ = {"XDG_CONFIG_HOME": str(tmp_path), "TMOVER_AGENT_STOP_S": "8"}

    agent = load(None, environ).agent

    assert (agent.retry_s, agent.stop_s) == (3.0, 8.0)


def test_a_file_that_is_named_is_read_alone(tmp_path: pathlib.Path) -> None:
    own(tmp_path, "[agent]\nretry_s = 3.0\n")
    named = tmp_path / "named.toml"
    named.write_text("[agent]\nstop_s = 7.0\n")

    agent = load(named, {"XDG_CONFIG_HOME": str(tmp_path)}).agent

    assert (agent.retry_s, agent.stop_s) == (Config().agent.retry_s, 7.0)


def test_a_user_s_own_file_that_others_can_write_is_refused(tmp_path: pathlib.Path) -> None:
    own(tmp_path, "").chmod(0o666)

    with pytest.raises(ConfigError, match=r"others can write to .*chmod go-w"):
        load(None, {"XDG_CONFIG_HOME": str(tmp_path)})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_s_file_is_not_taken_for_one_s_own(tmp_path: pathlib.Path) -> None:
    os.chown(own(tmp_path, "[agent]\nretry_s = 3.0\n"), 65533, -1)

    assert load(None, {"XDG_CONFIG_HOME": str(tmp_path)}) == Config()


def test_a_mistake_in_one_s_own_file_names_it(tmp_path: pathlib.Path) -> None:
    path = own(tmp_path, "[agent]\nretry = 3.0\n")

    with pytest.raises(ConfigError, match=str(path)):
        load(None, {"XDG_CONFIG_HOME": str(tmp_path)})


def test_what_a_user_sets_goes_before_what_the_site_sets_key_by_key(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site.toml"
    site.write_text('[agent]\nretry_s = 4.0\nstop_s = 9.0\n[controller]\nstate = "/c"\n')
    own(tmp_path, "[agent]\nretry_s = 3.0\n")
    monkeypatch.setattr(config, "SITE_FILE", site)

    found = load(None, {"XDG_CONFIG_HOME": str(tmp_path)})

    assert (found.agent.retry_s, found.agent.stop_s, found.controller.state) == (3.0, 9.0, "/c")
