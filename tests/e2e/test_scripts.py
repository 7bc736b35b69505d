"""What a script or a person can do wrong: one clear line, nothing lost."""

from __future__ import annotations

import pathlib

import pytest

from e2e.conftest import Twin
from support.eventually import eventually
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
    alone = {"TMOVER_WORKER_RECORDINGS": ""}  # by recorded shapes DDP itself would refuse it
    training = Training(cluster, KIND, hold_at=3, script=script, settings=alone)

    training.until(lambda status: any("does not fit the job" in note for note in status.notes))
    training.open_gate()
    outcome = training.finish()

    assert_as_if_undisturbed(outcome, undisturbed(KIND), KIND)
    said = " ".join(outcome.status.notes)
    assert "tracked `model`, `optimizer` differ" in said
    eventually(lambda: "tracked `model`, `optimizer` differ" in training.log())


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


LOOP = """
import os, signal, torch, torch.distributed as dist, tmover
from torch.nn.parallel import DistributedDataParallel as DDP
session = tmover.init()
model, critic = DDP(torch.nn.Linear(4, 1)), DDP(torch.nn.Linear(4, 1))
optimizer, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, critic))
session.track({tracked})
data = torch.arange(96.0).view(24, 4)
sampler = torch.utils.data.DistributedSampler(data)
loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
for step in session.steps(loader, total=6):
    with step:
        model(step.batch).sum().backward()
        {before_update}
        optimizer.step()
        {after_update}
        optimizer.zero_grad()
    {between}
{after_loop}
"""
ASKS = """
    if step.committed and (session.rank, step.index) in {(0, 1), (1, 2)}:
        os.kill(os.getpid(), signal.SIGUSR1)  # one rank after the other, and rank 2 never
    if step.committed and step.checkpoint_requested:
        os.write(1, b"saved %d\\n" % step.index)  # in one piece: ranks share the file
        os.kill(os.getpid(), signal.SIGUSR1)  # late, for the same
"""
REDUCE = "dist.all_reduce(torch.ones(1))"
NOTHING = {
    "tracked": "model=model, optimizer=optimizer, critic=critic, second=second",
    **dict.fromkeys(("before_update", "after_update", "between", "after_loop"), "pass"),
}
LEFT = "print('left')"


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"after_update": REDUCE}, "a collective after the first optimizer.step()"),
        (
            {"after_update": "critic(step.batch).sum().backward(); second.step()"},
            "a collective after the first optimizer.step()",
        ),
        (
            {"after_update": "dist.all_gather_object([None] * 2, 1)"},
            "a collective after the first optimizer.step()",
        ),
        ({"between": REDUCE}, "a collective outside of `with step:`"),
        ({"tracked": "model=model"}, "the optimizer would not be handed over"),
        ({"tracked": "optimizer=optimizer"}, "the model would not be handed over"),
        (
            {
                "before_update": "model.module.extra = torch.nn.Linear(1, 1)\n"
                "        optimizer.add_param_group({'params': model.module.extra.parameters()})"
            },
            "tracked `model`: parameter `extra.weight` was added after session.track()",
        ),
    ],
)
def test_what_could_not_be_done_again_or_handed_over_is_refused_at_once(
    cluster: LocalCluster, tmp_path: pathlib.Path, parts: dict[str, str], told: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOOP.format_map({**NOTHING, **parts}))

    outcome = Training(cluster, Kind(nodes=2), standby=0, script=script).finish()

    assert outcome.status.code == 1
    assert told in outcome.status.outcome


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"after_loop": REDUCE}, "a collective after the loop"),
        ({"between": f"if step.index == 4: {REDUCE}"}, "a collective outside of `with step:`"),
    ],
)
def test_what_is_found_late_and_goes_well_without_a_loss_is_said_and_done(
    cluster: LocalCluster, tmp_path: pathlib.Path, parts: dict[str, str], told: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOOP.format_map({**NOTHING, **parts}))
    training = Training(cluster, Kind(nodes=2), standby=0, script=script)

    outcome = training.finish()

    assert outcome.status.code == 0
    assert training.log().count(told) == 2


def test_a_loop_may_be_left_early_when_its_step_is_committed(
    cluster: LocalCluster, tmp_path: pathlib.Path
) -> None:
    script = tmp_path / "train.py"
    early = "\n    if step.committed and step.index == 3: break"
    text = LOOP.format_map({**NOTHING, "between": early, "after_loop": LEFT})
    script.write_text(text)
    training = Training(cluster, Kind(nodes=2), standby=0, script=script)

    outcome = training.finish()

    assert outcome.status.code == 0
    assert training.log().count("left") == 2


@pytest.mark.parametrize(
    ("standby", "inject", "told"),
    [
        (0, "kill:rank=1,step=3,point=before_vote", "would have been done again"),
        (1, "", "while a standby rehearsed"),
    ],
)
def test_a_loop_left_inside_a_step_that_is_void_ends_the_process(
    cluster: LocalCluster, tmp_path: pathlib.Path, standby: int, inject: str, told: str
) -> None:
    script, gate = tmp_path / "train.py", tmp_path / "gate"
    early = "if step.index == 3 or session.sandbox: break"
    held = f"while not os.path.exists({str(gate)!r}): time.sleep(0.01)"
    parts = {"before_update": early, "between": held, "after_loop": LEFT}
    script.write_text("import time" + LOOP.format_map({**NOTHING, **parts}))
    training = Training(cluster, Kind(nodes=2), standby=standby, inject=inject, script=script)
    if standby:  # which has its say before the job can end
        eventually(lambda: told in training.log(), timeout_s=60)
    gate.touch()

    training.finish()

    assert told in training.log()


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
