"""The tables of options say what the commands say."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess

import pytest

from tmover.scheduler.slurm.options import SBATCH, SRUN, Takes, sbatch, srun

pytestmark = pytest.mark.slurm

HELP = re.compile(r"^ +(?:-(\w),?)? +--([a-z][a-z-]+)", re.MULTILINE)
TABLES = {"sbatch": (SBATCH, sbatch), "srun": (SRUN, srun)}


@pytest.fixture
def env(tmp_path: pathlib.Path) -> dict[str, str]:
    """A cluster that is not there: the commands must say what is wrong before they ask it."""
    (tmp_path / "slurm.conf").write_text("ClusterName=none\nSlurmctldHost=localhost\n")
    return {**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf"), "LC_ALL": "C"}


def say(env: dict[str, str], *argv: str) -> str:
    done = subprocess.run(
        argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("command", ["sbatch", "srun"])
def test_the_tables_have_every_option_of_the_command(command: str, env: dict[str, str]) -> None:
    table, grammar = TABLES[command]
    found = HELP.findall(say(env, command, "--help"))

    assert len(found) > 80
    for letter, name in found:
        takes = Takes.VALUE
        if "requires an argument" not in say(env, command, f"--{name}"):
            refuses = "doesn't allow an argument" in say(env, command, f"--{name}=1")
            takes = Takes.NOTHING if refuses else Takes.MAYBE
        known = table.get(name)
        is_newer = known is Takes.MAYBE and takes is Takes.NOTHING  # a later Slurm's takes a value
        assert is_newer or (name, known) == (name, takes)
        if letter:
            words = [f"-{letter}", *(["7"] if takes is Takes.VALUE else [])]
            assert grammar.read(words)[0][0].name == name
