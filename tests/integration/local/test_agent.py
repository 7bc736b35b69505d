"""One real agent with real workers, and a controller that says what the test says."""

from __future__ import annotations

import os
import pathlib
import re
import signal
from collections.abc import Iterator

import pytest

from support.desk import ScriptedController
from support.eventually import eventually
from support.forkserver import ForkServer
from tmover import wire
from tmover.cluster import agent_argv
from tmover.core.events import (
    NO_STEP,
    Answered,
    Exited,
    Finished,
    Joined,
    Launched,
    Left,
    Member,
    Plan,
)
from tmover.core.orders import Probe, Start, Stop
from tmover.process import ProcessId, children, descendants, is_alive, is_stopped, send_signal
from tmover.scheduler.inhabitants import find_agent, find_worker
from tmover.scheduler.local import LocalScheduler
from tmover.scheduler.store import Command, StepStatus

WAITS = "print('up', flush=True)\nimport signal\nwhile True: signal.pause()\n"
JOB = "7"
QUICK = {"TMOVER_AGENT_HEARTBEAT_S": "0.05", "TMOVER_AGENT_STOP_S": "0.3"}


class Node:
    """A node on which an agent runs."""

    def __init__(self, state: pathlib.Path, server: ForkServer) -> None:
        self.state = state
        self.scheduler = LocalScheduler(state / "cluster", spawn=server.spawn)
        self.name = ""
        self.step = ""
        self.job = JOB

    def start(self, text: str, *flags: str, nproc: int = 1, **env: str) -> None:
        script = self.state / "script.py"
        script.write_text(text)
        (self.name,) = self.scheduler.claim(self.job, 1)
        argv = agent_argv(str(script), nproc=nproc, flags=flags)
        environment = {**os.environ, **QUICK, **env}
        logs = str(self.state / "logs")
        self.scheduler.register(
            self.job, Command(argv=argv, env=environment, cwd=str(self.state), logs=logs)
        )
        self.step = self.scheduler.launch(self.job, self.name, standby=True)

    @property
    def log(self) -> str:
        return (self.state / "logs" / f"{self.name}.log").read_text()

    @property
    def holder(self) -> ProcessId:
        found = self.scheduler.holder(self.name)
        assert found is not None, self.log
        return found

    def agent(self) -> ProcessId:
        return find_agent(self.holder)

    def worker(self, local_rank: int = 0) -> ProcessId:
        return find_worker(self.holder, local_rank)

    def tree(self) -> set[ProcessId]:
        return descendants(self.holder.pid)

    def end(self) -> StepStatus:
        """Return how the agent ended."""
        status = eventually(lambda: self.scheduler.status(self.step), timeout_s=60)
        assert status is not None
        eventually(lambda: not self.scheduler.running(self.job))
        return status


@pytest.fixture
def state(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "state"


@pytest.fixture
def controller(state: pathlib.Path) -> Iterator[ScriptedController]:
    with ScriptedController(state) as made:
        yield made


@pytest.fixture
def node(state: pathlib.Path, fork_server: ForkServer) -> Iterator[Node]:
    state.mkdir(exist_ok=True)
    made = Node(state, fork_server)
    yield made
    made.scheduler.release(made.job)


def up(node: Node, controller: ScriptedController, text: str = WAITS, nproc: int = 1) -> Joined:
    """Bring an agent up to where its workers run the script in rehearsal."""
    node.start(text, nproc=nproc)
    joined = controller.expect(Joined)
    controller.welcome(joined)
    controller.expect(Launched)
    eventually(lambda: node.log.count("up") == nproc)
    return joined


def stop(joined: Joined, code: int, reason: str) -> Stop:
    return Stop(job=JOB, agent=joined.agent, code=code, reason=reason)


# --- joining --------------------------------------------------------------------------------------


def test_an_agent_introduces_itself(node: Node, controller: ScriptedController) -> None:
    node.start(WAITS, nproc=2)

    joined = controller.expect(Joined)

    assert re.fullmatch(r"node1-[0-9a-f]{8}", joined.agent)
    assert joined == Joined(
        job=JOB, agent=joined.agent, node="node1", address="127.0.0.2", nproc=2, standby=True
    )


def test_once_welcomed_it_reports_where_its_workers_listen(
    node: Node, controller: ScriptedController
) -> None:
    node.start(WAITS, nproc=2)
    joined = controller.expect(Joined)

    controller.welcome(joined, launch=3)

    launched = controller.expect(Launched)
    assert (launched.agent, launched.launch) == (joined.agent, 3)
    assert len({*launched.endpoints}) == 2
    assert all(endpoint.startswith("127.0.0.2:") for endpoint in launched.endpoints)


def test_it_joins_again_until_it_is_heard(node: Node, controller: ScriptedController) -> None:
    controller.answers_heartbeats = False
    node.start(WAITS)

    first, second = controller.expect(Joined), controller.expect(Joined)

    assert first == second


def test_it_waits_for_a_controller_that_starts_later(node: Node, state: pathlib.Path) -> None:
    node.start(WAITS)
    eventually(lambda: len(node.tree()) >= 4)

    with ScriptedController(state) as controller:
        assert controller.expect(Joined).job == JOB


def test_without_a_controller_it_gives_up_with_one_line(node: Node) -> None:
    node.start(WAITS, TMOVER_AGENT_JOIN_S="0.2")

    assert node.end() == StepStatus(code=4)
    assert node.log.startswith("error: no controller runs on")
    assert node.log.count("\n") == 1


def test_a_job_that_is_unknown_ends_it(node: Node, controller: ScriptedController) -> None:
    node.start(WAITS)
    joined = controller.expect(Joined)

    controller.refuse(joined.agent, "there is no job 7 here", is_unknown=True)

    assert node.end() == StepStatus(code=1)
    assert node.log == "error: there is no job 7 here\n"


def test_a_job_of_slurm_may_become_known_after_it_has_started(
    node: Node, controller: ScriptedController
) -> None:
    controller.answers_heartbeats = False
    node.job = "slurm7"
    node.start(WAITS)
    for _ in range(3):
        joined = controller.expect(Joined)
        controller.refuse(joined.agent, "there is no job slurm7 here", is_unknown=True)

    controller.welcome(controller.expect(Joined))
    controller.answers_heartbeats = True

    assert controller.expect(Launched).agent == joined.agent


def test_a_job_of_slurm_that_stays_unknown_ends_it_with_what_to_do(
    node: Node, controller: ScriptedController
) -> None:
    controller.answers_heartbeats = False
    node.job = "slurm7"
    node.start(WAITS, TMOVER_AGENT_JOIN_S="1.5")
    joined = controller.expect(Joined)

    controller.refuse(joined.agent, "there is no job slurm7 here", is_unknown=True)

    assert node.end() == StepStatus(code=1)
    assert node.log == (
        "error: there is no job slurm7 here: submit its script with `tmover submit`\n"
    )


def test_a_job_of_slurm_that_is_known_and_refused_ends_it_at_once(
    node: Node, controller: ScriptedController
) -> None:
    node.job = "slurm7"
    node.start(WAITS)
    joined = controller.expect(Joined)

    controller.refuse(joined.agent, "job slurm7 is not ann's")

    assert node.end() == StepStatus(code=1)
    assert node.log == "error: job slurm7 is not ann's\n"


def test_a_wrong_key_ends_it_with_one_line(node: Node, controller: ScriptedController) -> None:
    (node.state / "keys" / "server.pub").write_text("rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7\n")

    node.start(WAITS)

    assert node.end() == StepStatus(code=2)
    assert "is not the one whose key is" in node.log
    assert node.log.count("\n") == 1


def test_another_number_of_workers_than_the_job_has_is_refused(
    node: Node, controller: ScriptedController
) -> None:
    node.start(WAITS, nproc=2)
    joined = controller.expect(Joined)

    controller.welcome(joined, nproc=4)

    assert node.end() == StepStatus(code=2)
    assert "has 4 workers per node, this node was started with --nproc-per-node 2" in node.log


# --- orders and events ----------------------------------------------------------------------------


def test_the_workers_learn_who_they_are(node: Node, controller: ScriptedController) -> None:
    node.start("import os; print('up', os.environ['RANK'], os.environ['WORLD_SIZE'])\n" + WAITS)
    controller.welcome(controller.expect(Joined), slot=2, nnodes=3)

    eventually(lambda: "up 2 3" in node.log)


def test_orders_reach_the_workers_and_their_events_the_controller(
    node: Node, controller: ScriptedController
) -> None:
    node.start("print('up')")
    joined = controller.expect(Joined)
    controller.welcome(joined, nnodes=1, sandbox=False)
    (endpoint,) = controller.expect(Launched).endpoints
    worker = f"{joined.agent}/0"
    member = Member(rank=0, worker=worker, node="node1", endpoint=endpoint)
    assert "up" not in node.log

    controller.send(Start(job=JOB, agent=joined.agent, plan=Plan(epoch=1, members=(member,))))

    assert controller.expect(Finished) == Finished(job=JOB, worker=worker, step=NO_STEP)
    assert "up" in node.log


def test_a_heartbeat_says_how_far_the_workers_are(
    node: Node, controller: ScriptedController
) -> None:
    up(node, controller, nproc=2)

    assert controller.hears_nothing(Exited)
    beat = controller.beats[-1]
    assert (beat.job, beat.steps) == (JOB, (NO_STEP, NO_STEP))


def test_a_probe_is_answered_while_all_workers_live(
    node: Node, controller: ScriptedController
) -> None:
    joined = up(node, controller, nproc=2)

    controller.send(Probe(job=JOB, agent=joined.agent, probe=5))

    assert controller.expect(Answered) == Answered(job=JOB, agent=joined.agent, probe=5)


def test_a_probe_is_not_answered_when_a_worker_is_stopped(
    node: Node, controller: ScriptedController
) -> None:
    joined = up(node, controller, nproc=2)
    worker = node.worker(1)
    send_signal(worker, signal.SIGSTOP)
    eventually(lambda: is_stopped(worker))

    controller.send(Probe(job=JOB, agent=joined.agent, probe=5))

    assert controller.hears_nothing(Answered)


def test_a_controller_that_was_restarted_hears_everything_again(
    node: Node, controller: ScriptedController, state: pathlib.Path
) -> None:
    joined = up(node, controller)
    controller.close()

    with ScriptedController(state, boot="boot2") as restarted:
        assert restarted.expect(Joined) == joined
        assert restarted.expect(Launched).launch == 1
        restarted.welcome(joined)
        assert restarted.hears_nothing(Exited)
    assert "up" in node.log
    assert node.log.count("up") == 1


def test_a_controller_that_asks_hears_everything_again(
    node: Node, controller: ScriptedController
) -> None:
    joined = up(node, controller)

    controller.send(wire.WhoAreYou(job=JOB, agent=joined.agent, boot=controller.boot))

    assert controller.expect(Joined) == joined
    assert controller.expect(Launched).launch == 1


def test_workers_go_on_while_there_is_no_controller(
    node: Node, controller: ScriptedController, state: pathlib.Path
) -> None:
    up(node, controller)
    before = node.tree()
    port = controller.port
    controller.close()
    eventually(lambda: "lost" not in node.log)

    with ScriptedController(state, boot="boot2", port=port) as restarted:
        restarted.expect(Joined)

    assert node.tree() == before


# --- the end of workers ---------------------------------------------------------------------------


def test_a_killed_worker_is_reported_and_takes_the_others_along(
    node: Node, controller: ScriptedController
) -> None:
    joined = up(node, controller, nproc=2)
    other = node.worker(0)

    send_signal(node.worker(1), signal.SIGKILL)

    assert controller.expect(Exited) == Exited(
        job=JOB, agent=joined.agent, launch=1, code=-9, reason="worker 1 was ended by SIGKILL"
    )
    eventually(lambda: not is_alive(other))
    assert is_alive(node.agent())


def test_a_worker_that_fails_is_reported_with_its_error(
    node: Node, controller: ScriptedController
) -> None:
    node.start("raise ValueError('the data is gone')")
    controller.welcome(controller.expect(Joined))

    exited = controller.expect(Exited)

    assert (exited.code, exited.launch) == (1, 1)
    assert exited.reason == "worker 0 failed: ValueError: the data is gone"


def test_an_exit_code_is_reported(node: Node, controller: ScriptedController) -> None:
    node.start("raise SystemExit(3)")
    controller.welcome(controller.expect(Joined))

    exited = controller.expect(Exited)

    assert (exited.code, exited.reason) == (3, "worker 0 failed: exit code 3")


def test_workers_that_end_before_they_are_welcomed_are_reported_afterwards(
    node: Node, controller: ScriptedController
) -> None:
    node.start(WAITS)
    joined = controller.expect(Joined)
    torchrun = eventually(lambda: _below(node.agent()))
    assert torchrun is not None
    send_signal(torchrun, signal.SIGKILL)
    assert controller.hears_nothing(Exited)

    controller.welcome(joined, launch=2)

    assert controller.expect(Exited).launch == 2


def _below(agent: ProcessId) -> ProcessId | None:
    """Return what stands in torchrun's place."""
    for zygote in children(agent.pid):
        for torchrun in children(zygote.pid):
            return torchrun
    return None


def test_when_torchrun_is_killed_the_workers_go_with_it(
    node: Node, controller: ScriptedController
) -> None:
    up(node, controller, nproc=2)
    workers = [node.worker(0), node.worker(1)]
    torchrun = _below(node.agent())
    assert torchrun is not None

    send_signal(torchrun, signal.SIGKILL)

    assert controller.expect(Exited).code == -9
    eventually(lambda: not any(is_alive(worker) for worker in workers))


def test_a_worker_that_is_stopped_for_long_counts_as_failed(
    node: Node, controller: ScriptedController
) -> None:
    node.start(WAITS, TMOVER_AGENT_STOPPED_S="0.2", TMOVER_AGENT_WATCH_S="0.05")
    controller.welcome(controller.expect(Joined))
    eventually(lambda: "up" in node.log)
    worker = node.worker()

    send_signal(worker, signal.SIGSTOP)

    assert controller.expect(Exited).reason == "worker 0 was stopped by a signal for 0.2 s"
    eventually(lambda: not is_alive(worker))


def test_a_worker_that_is_stopped_for_a_moment_is_left_alone(
    node: Node, controller: ScriptedController
) -> None:
    up(node, controller)
    worker = node.worker()

    send_signal(worker, signal.SIGSTOP)
    send_signal(worker, signal.SIGCONT)

    assert controller.hears_nothing(Exited, beats=20)
    assert is_alive(worker)


def test_a_higher_launch_starts_the_workers_afresh(
    node: Node, controller: ScriptedController
) -> None:
    joined = up(node, controller, nproc=2)
    before = [node.worker(0), node.worker(1)]

    controller.welcome(joined, launch=2, slot=1)

    controller.expect(Launched, launch=2)
    assert not any(is_alive(worker) for worker in before)
    eventually(lambda: node.log.count("up") == 4)
    assert controller.hears_nothing(Exited)


def test_workers_that_ended_can_be_started_afresh(
    node: Node, controller: ScriptedController
) -> None:
    joined = up(node, controller)
    send_signal(node.worker(), signal.SIGKILL)
    controller.expect(Exited)

    controller.welcome(joined, launch=2)

    controller.expect(Launched, launch=2)
    controller.send(wire.WhoAreYou(job=JOB, agent=joined.agent, boot=controller.boot))
    controller.expect(Launched, launch=2)
    assert controller.hears_nothing(Exited)


@pytest.mark.parametrize("launch", [0, 1])
def test_a_welcome_that_was_heard_before_changes_nothing(
    node: Node, controller: ScriptedController, launch: int
) -> None:
    joined = up(node, controller)
    before = node.tree()

    controller.welcome(joined, launch=launch)

    assert controller.hears_nothing(Launched)
    assert node.tree() == before


# --- the end of the agent -------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "reason"), [(0, "done"), (0, "released"), (1, "x"), (130, "y")])
def test_told_to_stop_it_ends_with_the_code_and_says_why(
    node: Node, controller: ScriptedController, code: int, reason: str
) -> None:
    joined = up(node, controller)

    controller.send(stop(joined, code, reason))

    assert node.end() == StepStatus(code=code)
    assert node.log.endswith(f"tmover: node node1: {reason}\n")


def test_workers_that_do_not_stop_are_killed(node: Node, controller: ScriptedController) -> None:
    node.start(
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n" + WAITS
    )
    joined = controller.expect(Joined)
    controller.welcome(joined)
    eventually(lambda: "up" in node.log)

    controller.send(stop(joined, 0, "released"))

    assert node.end() == StepStatus(code=0)


def test_without_workers_it_stops_at_once(node: Node, controller: ScriptedController) -> None:
    joined = up(node, controller)
    send_signal(node.worker(), signal.SIGKILL)
    controller.expect(Exited)

    controller.send(stop(joined, 1, "no use"))

    assert node.end() == StepStatus(code=1)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_a_signal_is_passed_on_and_the_controller_hears_what_came_of_it(
    node: Node, controller: ScriptedController, number: signal.Signals, code: int
) -> None:
    up(node, controller)

    send_signal(node.agent(), number)

    assert controller.expect(Left).code == -number
    assert controller.hears_nothing(Exited, beats=1)
    assert node.end() == StepStatus(code=code)


def test_a_script_may_handle_a_signal_itself(node: Node, controller: ScriptedController) -> None:
    handles = "import signal; signal.signal(signal.SIGUSR1, lambda *a: print('usr1', flush=True))\n"
    up(node, controller, handles + WAITS)

    send_signal(node.agent(), signal.SIGUSR1)

    eventually(lambda: "usr1" in node.log)
    assert controller.hears_nothing(Exited)


def test_a_request_for_a_checkpoint_reaches_workers_that_are_started_afresh_too(
    node: Node, controller: ScriptedController
) -> None:
    tells = (
        "print('up', flush=True)\n"
        "import time\n"
        "from tmover.worker import signals\n"
        "while True:\n"
        "    if signals.listen().take(): print('asked', flush=True)\n"
        "    time.sleep(0.01)\n"
    )
    joined = up(node, controller, tells)
    send_signal(node.agent(), signal.SIGUSR1)
    eventually(lambda: node.log.count("asked") == 1)

    controller.welcome(joined, launch=2)

    eventually(lambda: node.log.count("asked") == 2)


def test_a_second_interrupt_does_not_wait_for_the_workers(
    node: Node, controller: ScriptedController
) -> None:
    ignores = "import signal; signal.signal(signal.SIGINT, lambda *a: print('no', flush=True))\n"
    up(node, controller, ignores + WAITS)
    send_signal(node.agent(), signal.SIGINT)
    eventually(lambda: "no" in node.log)

    send_signal(node.agent(), signal.SIGINT)

    assert node.end() == StepStatus(code=130)


def test_an_agent_that_was_told_to_end_starts_nothing_any_more(
    node: Node, controller: ScriptedController
) -> None:
    ignores = "import signal; signal.signal(signal.SIGTERM, lambda *a: print('no', flush=True))\n"
    joined = up(node, controller, ignores + WAITS)
    before = node.tree()
    send_signal(node.agent(), signal.SIGTERM)
    eventually(lambda: "no" in node.log)

    controller.welcome(joined, launch=2)

    assert controller.hears_nothing(Exited)
    assert node.tree() == before


def test_a_killed_agent_leaves_nothing(node: Node, controller: ScriptedController) -> None:
    up(node, controller, nproc=2)
    before = node.tree()

    send_signal(node.agent(), signal.SIGKILL)

    assert node.end() == StepStatus(code=-9)
    assert not any(is_alive(process) for process in before)


def test_without_workers_and_without_a_controller_it_ends_after_a_while(
    node: Node, controller: ScriptedController
) -> None:
    node.start("raise SystemExit(3)", TMOVER_WORKER_FENCE_AFTER_S="0.5")
    controller.welcome(controller.expect(Joined))
    controller.expect(Exited)

    controller.close()

    assert node.end() == StepStatus(code=3)
    assert "and no controller answers" in node.log


def test_workers_that_have_trained_nothing_are_not_waited_for_when_the_job_is_cancelled(
    node: Node, controller: ScriptedController
) -> None:
    node.start(WAITS, TMOVER_AGENT_STOP_S="1000")
    joined = controller.expect(Joined)
    controller.welcome(joined)
    eventually(lambda: "up" in node.log)

    controller.send(stop(joined, 130, "cancelled"))

    assert node.end() == StepStatus(code=130)
