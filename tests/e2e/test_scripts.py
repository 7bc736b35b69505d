"""What a script or a person can do wrong: one clear line, nothing lost."""

from __future__ import annotations

import pathlib

import pytest

from e2e.conftest import Twin
from support.training import Kind, Training, assert_as_if_undisturbed
from tmover.cluster import LocalCluster

KIND = Kind()


def test_a_standby_that_runs_another_model_is_refused_and_the_job_goes_on(
    cluster: LocalCluster, undisturbed: Twin, tmp_path: pathlib.Path
) -> None:
    script = tmp_path / "other.py"
    script.write_text(
        "import os, runpy, sys\n"
        "from support.training import SCRIPT\n"
        "if os.environ['TMOVER_ROLE'] == 'standby':\n"
        "    sys.argv += ['--hidden', '48']\n"
        "runpy.run_path(str(SCRIPT), run_name='__main__')\n"
    )
    training = Training(cluster, KIND, hold_at=3, script=script)

    training.until(lambda status: any("does not fit the job" in note for note in status.notes))
    training.open_gate()
    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(KIND), KIND)
    said = " ".join(outcome.status.notes)
    assert "tracked `model`, `optimizer` differ" in said
    assert "tracked `model`, `optimizer` differ" in training.log()


def test_a_script_that_fails_by_itself_ends_the_job_with_its_error(cluster: LocalCluster) -> None:
    training = Training(cluster, KIND, arguments=("--fail-at", "4"))

    outcome = training.finish()

    assert outcome.status.code == 1
    assert "the script's own error" in outcome.status.outcome
    assert "ValueError: the script's own error" in training.log()


def test_a_step_that_kills_every_rank_that_does_it_ends_the_job(cluster: LocalCluster) -> None:
    fault = "rank=1,step=7,point=in_backward"
    training = Training(cluster, KIND, standby=3, inject=f"kill:{fault};kill:sandbox=1,{fault}")

    outcome = training.finish()

    assert outcome.status.code == 1
    assert "slot 1 was lost 3 times after step 6" in outcome.status.outcome


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (
            "DataLoader(Subset(range(64), range(session.rank, 64, 2)))",
            "over `Subset`, does not",
        ),
        ("iter(range(64))", "the loader is an iterator that can be gone through only once"),
    ],
    ids=["a subset for the rank", "an iterator"],
)
def test_a_loader_that_no_joiner_could_go_on_with_is_refused_when_the_loop_begins(
    cluster: LocalCluster, tmp_path: pathlib.Path, loader: str, reason: str
) -> None:
    script = tmp_path / "other.py"
    script.write_text(
        "import tmover\n"
        "from torch.utils.data import DataLoader, Subset\n"
        "session = tmover.init()\n"
        f"for step in session.steps({loader}, total=20):\n"
        "    with step:\n"
        "        pass\n"
    )

    outcome = Training(cluster, Kind(nodes=2), standby=0, script=script).finish()

    assert outcome.status.code != 0
    assert reason in outcome.status.outcome
    assert not outcome.events("attempt")
