"""A script that would not survive a node is refused, with the line to write instead."""

from __future__ import annotations

import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tmover.errors import ConfigError
from tmover.scheduler.slurm.options import sbatch
from tmover.scheduler.slurm.script import Problem, check, check_options, output_pattern, steps

TEMPLATES = sorted((pathlib.Path(__file__).parents[4] / "slurm" / "templates").glob("*.sbatch"))
GOOD = "srun --no-kill --kill-on-bad-exit=0 --output=%x.%j.%N.log tmover run train.py"
NO_KILL = "without --no-kill"
BAD_EXIT = "without --kill-on-bad-exit=0"
OUTPUT = "without --output"
TORCHRUN = "torchrun starts it"
FIXED = "a fixed number or list"
TASKS = "several tasks"


def script(*lines: str) -> str:
    return "\n".join(["#!/bin/bash", *lines, ""])


def problems(text: str, words: str = "") -> list[Problem]:
    return check(text, sbatch.read(words.split())[0])


def begins(found: list[Problem]) -> list[str]:
    known = (NO_KILL, BAD_EXIT, OUTPUT, TORCHRUN, FIXED, TASKS, "without srun")
    return [next((k for k in known if one.text.startswith(k)), one.text) for one in found]


@pytest.mark.parametrize(
    "line",
    [
        GOOD,
        "exec srun -k -K0 -o %n.log tmover run -m train",
        "time srun -k -K0 -o '%t.log' --nodes=$SLURM_NNODES -n $SLURM_NNODES tmover run x.py",
        "srun -k -K0 -o %N bash -c 'cd /x && tmover run train.py'",
        "srun -k -K0 -o %N apptainer exec img tmover --log-level INFO run train.py",
        "srun -k -K0 -o %N python -m tmover run train.py",
        "RUN='tmover run --nproc-per-node 8'\nsrun -k -K0 -o %N $RUN train.py",
        "OPTS='--no-kill -K0 -o %N'\nsrun $OPTS tmover run train.py",
        "export SLURM_NO_KILL=1 SLURM_KILL_BAD_EXIT=0\nsrun -o %N tmover run train.py",
        "srun hostname\n" + GOOD,
        "if true; then\n" + GOOD + "\nfi",
    ],
)
def test_a_good_line_is_good(line: str) -> None:
    assert problems(script(line)) == []


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_the_templates_are_good(template: pathlib.Path) -> None:
    assert problems(template.read_text()) == []
    assert output_pattern(template.read_text()) == "%x.%j.%N.log"


@pytest.mark.parametrize(
    ("line", "found", "mended"),
    [
        (
            "srun torchrun --nnodes=2 --rdzv-id=1 train.py \"$@\"",
            [TORCHRUN, NO_KILL, BAD_EXIT, OUTPUT],
            "srun --no-kill --kill-on-bad-exit=0 --output=%x.%j.%N.log "
            "tmover run --nnodes=2 --rdzv-id=1 train.py \"$@\"",
        ),
        (
            "srun -k -K0 -o %N python3 -u -m torch.distributed.run train.py",
            [TORCHRUN],
            "srun -k -K0 -o %N tmover run train.py",
        ),
        (
            "srun -k -K0 -o %N bash -c \"torchrun --node-rank $SLURM_PROCID train.py\"",
            [TORCHRUN],
            "srun -k -K0 -o %N bash -c \"tmover run --node-rank $SLURM_PROCID train.py\"",
        ),
        (
            "A=1 exec srun -K -o log tmover run train.py",
            [NO_KILL, BAD_EXIT, OUTPUT],
            "A=1 exec srun --no-kill --kill-on-bad-exit=0 --output=%x.%j.%N.log "
            "tmover run train.py",
        ),
        (
            "srun -N 4 --ntasks=4 -k -K0 -o %N tmover run train.py",
            [FIXED],
            "srun -k -K0 -o %N tmover run train.py",
        ),
        (
            "srun -w node1,node2 -k -K0 -o %N tmover run train.py",
            [FIXED],
            "srun -k -K0 -o %N tmover run train.py",
        ),
        ("tmover run train.py", ["without srun"], GOOD),
        ("torchrun train.py", ["without srun", TORCHRUN], GOOD),
        (
            "RUN=torchrun\nsrun -k -K0 -o %N $RUN train.py",
            [TORCHRUN],
            "",
        ),
    ],
)  # fmt: skip
def test_a_wrong_line_is_mended(line: str, found: list[str], mended: str) -> None:
    seen = problems(script(line))

    assert begins(seen) == found
    assert {one.mended for one in seen} == {mended}
    assert {one.line for one in seen} == {1 + len(line.splitlines())}


srun_words = st.lists(
    st.sampled_from(
        ["-N 2", "--nodes=$SLURM_NNODES", "-n4", "--ntasks=1", "-k", "--no-kill=off", "-K", "-K0",
         "--kill-on-bad-exit=1", "-o log", "-o %x.%N", "--output=%t.log", "-w n1", "--mpi=none",
         "--ntasks-per-node=1", "--ntasks-per-node=8", "--cpu-bind=none", "-l", "$EXTRA"]
    ),
    max_size=6,
)  # fmt: skip


@given(
    srun_words,
    st.sampled_from(["torchrun x.py", "tmover run x.py", "python -m torch.distributed.run x.py"]),
    st.sampled_from(["", "--ntasks-per-node=8", "-N2 -n16"]),
)
def test_what_is_mended_is_good(words: list[str], program: str, asked: str) -> None:
    seen = problems(script(" ".join(["srun", *words, program])), asked)

    for problem in seen:
        assert problems(script(problem.mended), asked) == []


@pytest.mark.parametrize("asked", ["--ntasks-per-node=8", "-N2 -n16"])
def test_several_tasks_of_a_node_need_a_word_to_srun(asked: str) -> None:
    [problem] = problems(script(GOOD), asked)

    assert problem.text.startswith(TASKS)
    assert "--ntasks=$SLURM_NNODES --ntasks-per-node=1 tmover run" in problem.mended


def test_ntasks_per_node_alone_does_not_make_it_one_task() -> None:
    line = GOOD.replace("srun", "srun --ntasks-per-node=1")

    assert begins(problems(script(line), "--ntasks-per-node=8")) == [TASKS]


@pytest.mark.parametrize(
    ("lines", "words", "complaint"),
    [
        (["#SBATCH --array=1-4"], "", "a job array"),
        ([], "-a 1", "a job array"),
        (["#SBATCH -N 2-4"], "", "--nodes=2-4 is no fixed number"),
        ([], "-N 2,4", "--nodes=2,4 is no fixed number"),
        (["#SBATCH -n 16"], "", "how many nodes the job gets is left to Slurm"),
        (["#SBATCH hetjob", "#SBATCH -N 2"], "", "a heterogeneous job"),
        ([], "--no-kill=off", "--no-kill=off"),
        ([], "-M other", "--clusters: "),
        ([], "--wrap=x", "--wrap: "),
        ([], "-W", "--wait: "),
    ],
)
def test_what_a_job_must_not_ask_for(lines: list[str], words: str, complaint: str) -> None:
    [problem] = problems(script(*lines, GOOD), words)

    assert problem.text.startswith(complaint)


@pytest.mark.parametrize("words", ["-N 2-2", "-N 4", "-n 1", "-N2 -n2", "-N 2 --gpus=16"])
def test_a_fixed_number_of_nodes_is_good(words: str) -> None:
    assert problems(script(GOOD), words) == []


def test_the_command_line_goes_before_the_script() -> None:
    assert problems(script("#SBATCH -N 2-4", GOOD), "-N 4") == []


def test_a_script_without_the_line_is_told_which() -> None:
    [problem] = problems(script("srun ./train.sh"))

    assert "no line of the script starts `tmover run`: write `srun --no-kill" in problem.text


def test_a_python_script_is_no_batch_script() -> None:
    [problem] = problems("import torch\n")

    assert "add --local" in problem.text


def test_unchecked_scripts_are_still_asked_what_they_ask_for() -> None:
    assert len(check_options(sbatch.read(["-N2-3", "-a1"])[0])) == 2


def test_a_line_of_srun_that_cannot_be_read_is_named() -> None:
    with pytest.raises(ConfigError, match="line 2: srun: --bogus is not known"):
        problems(script("srun --bogus tmover run x.py"))


@given(st.text())
def test_any_script_is_checked(text: str) -> None:
    try:
        found = check("#!" + text)
    except ConfigError:
        return

    assert found or steps("#!" + text)
