"""The commands that submit a job and its standbys, word for word."""

from __future__ import annotations

import os
import pathlib
import shlex
import subprocess

import pytest

from tmover.config import StandbyConfig
from tmover.scheduler.slurm import render
from tmover.scheduler.slurm.options import Option, merged, sbatch, script_options

GOLDEN = pathlib.Path(__file__).parent / "golden"
SCRIPT = """#!/bin/bash
#SBATCH --job-name=gpt --nodes=4 --ntasks-per-node=2 --cpus-per-task=4
#SBATCH --gpus=a100:32 --time=24:00:00 --output=train.log --error=%x.%j.err
#SBATCH --nodelist=n[1-4] --dependency=afterok:7 --hold --mail-type=END --requeue
#SBATCH --partition=batch --signal=USR1@120 --export=NONE --comment='a b'

srun tmover run train.py
"""
GIVEN = "-p gpu --exclusive --reservation=mine -x n9"


def asked(words: str = GIVEN) -> list[Option]:
    return merged(script_options(SCRIPT), sbatch.read(words.split())[0])


def standby(config: StandbyConfig) -> list[str]:
    base = render.standby_base(asked(), 4)
    return render.standby_options(base, config, "slurm7", "gpt", ["n1", "n2"])


def job() -> list[str]:
    return render.job_options(sbatch.read(GIVEN.split())[0], asked())


POOL = StandbyConfig(partition="spare", reservation="pool", qos="low", prefer="ib")
COMMANDS: dict[str, list[str]] = {
    "job": job(),
    "allocation": render.allocation_options(asked(), "gpt"),
    "standby": standby(StandbyConfig()),
    "standby-pool": standby(POOL),
    "step": render.step_argv(
        "7", "n1", ["/state/script", "a b"], name="gpt", cwd="/home/ann", asked=asked()
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_are_as_they_were(name: str) -> None:
    shown = "\n".join(COMMANDS[name]) + "\n"

    assert shown == (GOLDEN / f"{name}.txt").read_text()


def test_a_step_of_a_held_job_writes_the_job_s_name_into_its_output_s() -> None:
    asked = sbatch.read(["--output=%x.%%x.%j.log"])[0]
    argv = render.step_argv("7", "n1", ["s"], name="50% gpt", cwd="/", asked=asked)

    assert "--output=50%% gpt.%%x.%j.log.n1" in argv


def test_the_script_of_a_standby_asks_for_nothing() -> None:
    mute = render.standby_script(SCRIPT)

    assert script_options(mute) == []
    assert mute.replace("##SBATCH", "#SBATCH") == SCRIPT


def test_a_standby_excludes_nothing_if_there_is_nothing_to_exclude() -> None:
    options = render.standby_options([], StandbyConfig(), "slurm7", "gpt")

    assert not any(option.startswith("--exclude") for option in options)


@pytest.mark.parametrize(
    ("export", "shown"),
    [
        (None, "--export=ALL"),
        ("ALL,A=1", "--export=ALL,A=1"),
        ("A,TMOVER_STATE", "--export=A,TMOVER_STATE,TMOVER_CONFIG,TMOVER_RESUME"),
        ("NONE", "--export=TMOVER_STATE,TMOVER_CONFIG,TMOVER_RESUME"),
        ("NIL", "--export=TMOVER_STATE,TMOVER_CONFIG,TMOVER_RESUME"),
    ],
)
def test_tmover_s_variables_always_reach_the_job(export: str | None, shown: str) -> None:
    options = [] if export is None else [Option("export", export)]

    assert shown in render.job_options(options, options)


@pytest.mark.parametrize(
    ("gpus", "share"), [("32", "8"), ("a100:32", "a100:8"), ("a:4,b:8", "a:1,b:2"), ("6", "2")]
)
def test_a_standby_has_a_node_s_part_of_the_gpus(gpus: str, share: str) -> None:
    assert render.standby_base([Option("gpus", gpus)], 4) == [f"--gpus-per-node={share}"]


def test_a_standby_never_writes_into_the_job_s_file() -> None:
    base = render.standby_base([Option("output", "a.log"), Option("error", "%j.err")], 2)

    assert base == ["--error=%j.err", "--output=a.log.standby-%j"]


def test_a_job_does_not_inherit_what_an_enclosing_job_was_told() -> None:
    environ = {
        "SLURM_CONF": "/etc/slurm.conf", "SLURM_JOB_ID": "1", "TMOVER_JOB": "slurm1",
        "TMOVER_ROLE": "standby", "TMOVER_SLOT": "3", "SBATCH_WAIT": "1", "SBATCH_QOS": "q",
        "HOME": "/home/ann",
    }  # fmt: skip

    kept = render.environment(environ)

    assert kept == {"SLURM_CONF": "/etc/slurm.conf", "SBATCH_QOS": "q", "HOME": "/home/ann"}
    assert render.standby_environment(kept, state="/s", job="slurm7") == {
        **kept, "TMOVER_STATE": "/s", "TMOVER_ROLE": "standby", "TMOVER_JOB": "slurm7",
    }  # fmt: skip


def test_the_shim_keeps_a_step_on_its_node(tmp_path: pathlib.Path) -> None:
    real, shim = tmp_path / "real", tmp_path / "srun"
    real.write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    shim.write_text(render.shim(str(real)))
    real.chmod(0o700)
    shim.chmod(0o700)
    env = {**os.environ, "SLURMD_NODENAME": "n 2"}

    done = subprocess.run([shim, "-K0", "a b"], env=env, capture_output=True, text=True, check=True)

    assert done.stdout.splitlines() == [
        "--nodelist=n 2", "--nodes=1", "--ntasks=1", "--overlap", "-K0", "a b",
    ]  # fmt: skip


def test_logs_are_shown_as_what_a_shell_finds() -> None:
    shown = render.log_glob("l/%x-%4j.%N.%%.log", cwd="/w", name="gpt", job="7", user="ann")

    assert shown == "/w/l/gpt-7.*.%.log"
    assert shlex.quote(shown) != shown
