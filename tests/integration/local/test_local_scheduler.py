import os
import pathlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from support.eventually import eventually
from tmover.errors import SchedulerError
from tmover.process import ProcessId, descendants, identify, is_alive, send_signal
from tmover.scheduler.inhabitants import find_agent
from tmover.scheduler.interface import NodeInfo, NodeState, Scheduler
from tmover.scheduler.local import LocalScheduler
from tmover.scheduler.store import Command, StepStatus

FAMILY = "echo up $TMOVER_NODE $TMOVER_ROLE $TMOVER_SLOT; sleep 1000 & setsid sleep 1000 & wait"
"""A command with a child in its own session, as torchrun's workers are."""


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "state" / "cluster"


@pytest.fixture
def local(root: pathlib.Path) -> Iterator[LocalScheduler]:
    made = LocalScheduler(root, capacity=4)
    yield made
    for node in made.nodes():
        made.end(node.name, "the test is over")


def register(local: LocalScheduler, root: pathlib.Path, job: str, script: str = FAMILY) -> None:
    argv, env = ("sh", "-c", script), {"PATH": os.environ["PATH"]}
    local.register(job, Command(argv=argv, env=env, cwd="/", logs=str(root / "logs" / job)))


def submit(local: LocalScheduler, root: pathlib.Path, job: str, nodes: int) -> list[str]:
    """Start `FAMILY` on some nodes, and wait until it is up."""
    names = local.claim(job, nodes)
    register(local, root, job)
    for slot, name in enumerate(names):
        local.launch(job, name, standby=False, slot=slot)
    logs = [root / "logs" / job / f"{name}.log" for name in names]
    eventually(lambda: all("up" in log.read_text() for log in logs))
    eventually(lambda: all(len(everything(local, name)) == 4 for name in names))
    return names


def everything(local: LocalScheduler, node: str) -> set[ProcessId]:
    """Return the holder, the shell and the two sleepers."""
    holder = local.holder(node)
    return set() if holder is None else descendants(holder.pid)


def states(local: LocalScheduler) -> dict[str, NodeState]:
    return {node.name: node.state for node in local.nodes()}


def info(local: LocalScheduler, node: str) -> NodeInfo:
    return next(one for one in local.nodes() if one.name == node)


def test_it_is_a_scheduler(local: LocalScheduler) -> None:
    scheduler: Scheduler = local

    assert scheduler.nodes() == []


def test_nodes_have_names_addresses_and_states_as_in_slurm(
    local: LocalScheduler, root: pathlib.Path
) -> None:
    submit(local, root, "7", 2)

    assert local.nodes() == [
        NodeInfo(name="node1", address="127.0.0.2", state=NodeState.ALLOCATED, job="7"),
        NodeInfo(name="node2", address="127.0.0.3", state=NodeState.ALLOCATED, job="7"),
    ]


def test_a_command_is_told_its_place(local: LocalScheduler, root: pathlib.Path) -> None:
    submit(local, root, "7", 2)

    assert (root / "logs/7/node2.log").read_text() == "up node2 member 1\n"


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 7", 7), ("kill -TERM $$", -15), ("no-such-tool", 127)],
)
def test_the_end_of_a_command_is_kept(
    local: LocalScheduler, root: pathlib.Path, script: str, code: int
) -> None:
    (node,) = local.claim("7", 1)
    register(local, root, "7", script)

    step = local.launch("7", node, standby=False)

    assert eventually(lambda: local.status(step)) == StepStatus(code=code)
    eventually(lambda: states(local)[node] is NodeState.IDLE)


def test_a_command_that_cannot_be_run_says_so_in_its_log(
    local: LocalScheduler, root: pathlib.Path
) -> None:
    (node,) = local.claim("7", 1)
    log = root / "log"

    step = local.start(node, ["/no/such/program"], env={}, job="7", log=log)

    assert eventually(lambda: local.status(step)) == StepStatus(code=127)
    assert "cannot run /no/such/program" in log.read_text()


def test_what_a_command_leaves_behind_is_killed(local: LocalScheduler, root: pathlib.Path) -> None:
    (node,) = local.claim("7", 1)
    register(local, root, "7", "setsid sleep 1000 & echo $!; exec true")

    step = local.launch("7", node, standby=False)

    eventually(lambda: local.status(step))
    orphan = int((root / f"logs/7/{node}.log").read_text())
    assert identify(orphan) is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_are_passed_on_to_the_command(
    local: LocalScheduler, root: pathlib.Path, number: signal.Signals
) -> None:
    (node,) = local.claim("7", 1)
    register(local, root, "7", "trap 'exit 5' TERM INT USR1; echo up; while :; do sleep 0.05; done")
    step = local.launch("7", node, standby=False)
    eventually(lambda: "up" in (root / f"logs/7/{node}.log").read_text())
    holder = local.holder(node)
    assert holder is not None

    send_signal(holder, number)

    assert eventually(lambda: local.status(step)) == StepStatus(code=5)


def test_a_node_whose_power_is_cut_is_down_and_nothing_of_it_is_left(
    local: LocalScheduler, root: pathlib.Path
) -> None:
    submit(local, root, "7", 2)
    before = everything(local, "node1")

    local.fail("node1")

    assert not any(is_alive(process) for process in before)
    assert states(local) == {"node1": NodeState.DOWN, "node2": NodeState.ALLOCATED}
    assert info(local, "node1").reason == "Node unexpectedly failed"


def test_a_node_whose_holder_is_killed_is_down_and_its_command_ends(
    local: LocalScheduler, root: pathlib.Path
) -> None:
    submit(local, root, "7", 1)
    holder = local.holder("node1")
    assert holder is not None
    command = find_agent(holder)

    send_signal(holder, signal.SIGKILL)

    eventually(lambda: not is_alive(command))
    assert states(local) == {"node1": NodeState.DOWN}


def test_a_fenced_node_is_free_again(local: LocalScheduler, root: pathlib.Path) -> None:
    submit(local, root, "7", 1)
    before = everything(local, "node1")

    local.end("node1", "it was lost")

    assert not any(is_alive(process) for process in before)
    assert states(local) == {"node1": NodeState.IDLE}


def test_fencing_a_node_twice_or_one_that_failed_changes_nothing(
    local: LocalScheduler, root: pathlib.Path
) -> None:
    submit(local, root, "7", 2)
    local.fail("node1")
    local.end("node2", "once")
    before = local.nodes()

    local.end("node1", "it was lost")
    local.end("node2", "twice")

    assert local.nodes() == before


def test_a_drained_node_goes_on_and_takes_no_new_work(
    local: LocalScheduler, root: pathlib.Path
) -> None:
    submit(local, root, "7", 1)

    local.drain("node1", "fan broken")

    assert info(local, "node1") == NodeInfo(
        name="node1", address="127.0.0.2", state=NodeState.DRAINING, reason="fan broken", job="7"
    )
    assert len(everything(local, "node1")) == 4
    local.end("node1", "done")
    assert info(local, "node1").state is NodeState.DRAINED
    assert local.claim("8", 1) == ["node2"]
    with pytest.raises(SchedulerError, match="drained, fan broken"):
        local.start("node1", ["true"], env={}, job="8", log=root / "log")


def test_a_resumed_node_is_free(local: LocalScheduler, root: pathlib.Path) -> None:
    submit(local, root, "7", 3)
    local.drain("node1", "x")
    local.end("node1", "x")
    local.fail("node2")
    local.drain("node3", "x")

    for node in ("node1", "node2", "node3"):
        local.resume(node)

    assert [node.state for node in local.nodes()] == [
        NodeState.IDLE, NodeState.IDLE, NodeState.ALLOCATED,
    ]  # fmt: skip


def test_another_node_is_ordered_for_the_job(local: LocalScheduler, root: pathlib.Path) -> None:
    submit(local, root, "7", 1)

    node = local.order("7", exclude=["node1", "node2"])

    assert node == "node3"
    eventually(lambda: (root / "logs/7/node3.log").read_text() == "up node3 standby\n")
    assert info(local, "node3").job == "7"


def test_no_node_is_ordered_when_none_is_free_or_the_job_is_unknown(
    local: LocalScheduler, root: pathlib.Path
) -> None:
    submit(local, root, "7", 3)
    local.fail("node2")

    assert local.order("7", exclude=["node4"]) is None
    assert local.order("8", exclude=[]) is None


def test_two_jobs_get_different_nodes(local: LocalScheduler, root: pathlib.Path) -> None:
    first, second = local.claim("7", 2), LocalScheduler(root, capacity=4).claim("8", 2)

    assert (first, second) == (["node1", "node2"], ["node3", "node4"])
    with pytest.raises(SchedulerError, match="0 free nodes, 1 are needed"):
        local.claim("9", 1)


def test_processes_that_claim_at_once_get_different_nodes(root: pathlib.Path) -> None:
    LocalScheduler(root)
    code = (
        "import pathlib, sys; from tmover.scheduler.local import LocalScheduler\n"
        "print(*LocalScheduler(pathlib.Path(sys.argv[1])).claim(sys.argv[2], 5), flush=True)\n"
        "input()"
    )
    claimers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(root), str(job)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for job in range(4)
    ]  # fmt: skip
    names = [one.stdout.readline().split() for one in claimers if one.stdout]
    for one in claimers:
        one.communicate("\n")

    assert len({name for claimed in names for name in claimed}) == 20


def test_a_claim_ends_with_its_claimant(local: LocalScheduler, root: pathlib.Path) -> None:
    code = (
        "import pathlib, sys; from tmover.scheduler.local import LocalScheduler\n"
        "LocalScheduler(pathlib.Path(sys.argv[1])).claim('7', 2)"
    )
    subprocess.run([sys.executable, "-c", code, str(root)], check=True)

    assert states(local) == {"node1": NodeState.IDLE, "node2": NodeState.IDLE}


def test_a_failed_node_comes_back_when_its_job_is_over(
    local: LocalScheduler, root: pathlib.Path
) -> None:
    submit(local, root, "7", 2)
    local.fail("node1")
    assert local.claim("8", 1) == ["node3"]

    local.end("node2", "the job ends")

    assert local.claim("9", 2) == ["node1", "node2"]


def test_a_released_job_leaves_nothing(local: LocalScheduler, root: pathlib.Path) -> None:
    submit(local, root, "7", 2)
    local.fail("node1")

    local.release("7")

    assert set(states(local).values()) == {NodeState.IDLE}
    assert local.running("7") == []
    assert local.order("7", exclude=[]) is None


def test_what_is_known_outlives_the_process_that_knew_it(
    local: LocalScheduler, root: pathlib.Path
) -> None:
    submit(local, root, "7", 2)
    local.drain("node2", "x")

    another = LocalScheduler(root, capacity=4)

    assert another.nodes() == local.nodes()
    another.end("node1", "from another process")
    assert states(local)["node1"] is NodeState.IDLE


def test_a_node_that_is_taken_cannot_be_started_on(
    local: LocalScheduler, root: pathlib.Path
) -> None:
    submit(local, root, "7", 1)
    local.claim("8", 1)

    for node, job in (("node1", "7"), ("node1", "9"), ("node2", "9")):
        with pytest.raises(SchedulerError, match=f"cannot start on {node}: it is allocated"):
            local.start(node, ["true"], env={}, job=job, log=root / "log")


@pytest.mark.parametrize("call", ["drain", "end"])
def test_an_unknown_node_is_an_error(local: LocalScheduler, call: str) -> None:
    with pytest.raises(SchedulerError, match="knows no node 'node9'"):
        getattr(local, call)("node9", "x")


def test_files_are_for_their_owner_only(local: LocalScheduler, root: pathlib.Path) -> None:
    submit(local, root, "7", 1)

    files = [file for file in root.rglob("*") if file.is_file()]
    assert {file.name: oct(file.stat().st_mode & 0o077) for file in files} == {
        file.name: "0o0" for file in files
    }


def test_a_damaged_file_is_named(local: LocalScheduler, root: pathlib.Path) -> None:
    submit(local, root, "7", 1)
    file = root / "nodes" / "node1.json"
    good = file.read_bytes()
    file.write_text("{")

    with pytest.raises(SchedulerError, match=r"node1\.json is damaged"):
        local.nodes()

    file.write_bytes(good)


def run_to_the_end(local: LocalScheduler, root: pathlib.Path) -> None:
    (node,) = local.claim("7", 1)
    register(local, root, "7", "exit 0")
    step = local.launch("7", node, standby=False)
    eventually(lambda: local.status(step) and not local.running("7"))


def test_old_steps_do_not_pile_up(local: LocalScheduler, root: pathlib.Path) -> None:
    for _ in range(4):
        run_to_the_end(local, root)

    assert len(list((root / "steps").iterdir())) <= 2


def test_without_its_directory_it_still_ends_what_it_started(
    local: LocalScheduler, root: pathlib.Path
) -> None:
    submit(local, root, "7", 1)
    running = everything(local, "node1")

    shutil.rmtree(root)
    LocalScheduler(root)  # another one in its place

    assert local.is_gone()
    local.release("7")
    assert not any(map(is_alive, running))
