"""What `tmover submit` says of a batch script before anything is asked of Slurm."""

from __future__ import annotations

import json
import pathlib
import re

import pytest
from click.testing import CliRunner

from tmover.cli.main import tmover

GOLDEN = pathlib.Path(__file__).parent / "golden"
LINE = "srun --no-kill --kill-on-bad-exit=0 --output=%x.%j.%N.log tmover run train.py"
SCRIPT = f"""#!/bin/bash
#SBATCH --job-name=train --nodes=4
#SBATCH --gpus=32 --output=train.log

{LINE} "$@"
"""


@pytest.fixture
def script(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A good script in the current directory, and no configuration from outside."""
    monkeypatch.chdir(tmp_path)
    for name in ("SBATCH_EXPORT", "SBATCH_JOB_NAME", "TMOVER_STATE", "TMOVER_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "train.sbatch"
    path.write_text(SCRIPT)
    return path


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(tmover, ["submit", *arguments])
    return done.exit_code, done.output


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize("name", ["sbatch", "headless"])
def test_a_dry_run_shows_every_command_and_script(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    how = ["--headless"] if name == "headless" else []

    code, output = run(
        "train.sbatch", "-p", "gpu", "--standby", "1", "--dry-run", "--state", "/state", *how,
        "--", "--lr", "3e-4",
    )  # fmt: skip

    shown = output.replace(str(tmp_path), "/cwd")
    assert (code, shown) == (0, (GOLDEN / f"dry-run-{name}.txt").read_text())


@pytest.mark.usefixtures("script")
def test_a_dry_run_can_be_read_by_a_program() -> None:
    code, output = run("train.sbatch", "--dry-run", "--json")

    parts = json.loads(output)
    assert code == 0
    assert [part["what"] for part in parts] == [
        "a controller, if none runs", "the job: 4 nodes", "the job's script",
    ]  # fmt: skip


def test_what_is_wrong_is_said_line_by_line_and_mended(script: pathlib.Path) -> None:
    script.write_text("#!/bin/bash\n#SBATCH -a 1-2\nsrun -K0 -o %N torchrun train.py\n")

    code, output = run("train.sbatch", "--dry-run")

    assert code == 2
    assert output.splitlines() == [
        "train.sbatch: a job array cannot be moved: submit one job at a time, without --array",
        "train.sbatch:3: torchrun starts it: `tmover run` must, which takes the same flags",
        "error: train.sbatch:3: without --no-kill, Slurm ends all of it when a node fails; "
        "write: srun -K0 -o %N --no-kill tmover run train.py",
    ]


def test_unchecked_lets_a_script_be_that_calls_others(script: pathlib.Path) -> None:
    script.write_text("#!/bin/bash\nexec ./launch.sh\n")

    assert run("train.sbatch", "--dry-run")[0] == 2
    assert run("train.sbatch", "--dry-run", "--unchecked")[0] == 0
    assert run("train.sbatch", "--dry-run", "--unchecked", "-N2-4")[0] == 2


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"#!/bin/bash\r\n", "lines that end as on DOS"),
        (b"#!/bin/bash\n\xff", "train.sbatch is not UTF-8"),
        (b"#!/bin/bash\n#SBATCH -N\n", "train.sbatch: line 2: sbatch: -N needs a value"),
    ],
)
def test_a_script_that_cannot_be_read_is_one_line(
    script: pathlib.Path, text: bytes, complaint: str
) -> None:
    script.write_bytes(text)

    code, output = run("train.sbatch", "--dry-run")

    assert (code, len(output.splitlines())) == (2, 1)
    assert complaint in output


@pytest.mark.usefixtures("script")
def test_the_job_s_name_is_the_one_slurm_will_give_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def standby(*words: str) -> str:
        output = run("train.sbatch", "--standby=1", "--dry-run", *words)[1]
        [name] = re.findall(r"--job-name=(\S+-standby)", output)
        return str(name)

    assert standby() == "train-standby"
    assert standby("-J", "mine") == "mine-standby"
    monkeypatch.setenv("SBATCH_JOB_NAME", "theirs")
    assert standby() == "theirs-standby"


def test_options_of_slurm_do_not_go_with_local() -> None:
    code, output = run("--local", "--headless", "--", "train.py")

    assert (code, "are for jobs of Slurm" in output) == (2, True)
