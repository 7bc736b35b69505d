import pytest

from tmover.agent.launcher import WorkerCommand, count_workers
from tmover.agent.run import shell_code
from tmover.errors import ConfigError


def test_torchrun_is_told_to_serve_one_node_and_to_restart_nothing() -> None:
    command = WorkerCommand(nproc=2, script="train.py", arguments=("--lr", "-m", "3"))

    assert command.torchrun_argv() == [
        "--nnodes=1", "--nproc-per-node=2", "--max-restarts=0",
        "--log-dir", "/dev/null", "--monitor-interval=1",
        "--module", "tmover.worker", "train.py", "--lr", "-m", "3",
    ]  # fmt: skip


def test_a_module_is_the_worker_s_to_run() -> None:
    command = WorkerCommand(nproc=1, script="pkg.train", arguments=("x",), module=True)

    assert command.torchrun_argv()[-5:] == ["--module", "tmover.worker", "-m", "pkg.train", "x"]


def test_flags_are_passed_on_and_go_before_our_own_defaults() -> None:
    flags = ("--log-dir", "/logs", "--tee", "3", "--monitor-interval", "5")

    argv = WorkerCommand(nproc=1, script="t.py", flags=flags).torchrun_argv()

    assert argv[3:9] == list(flags)
    assert argv.count("--log-dir") == argv.count("--monitor-interval") == 1


@pytest.mark.parametrize("text", ["0", "-1", "x", "1.5", "", "²"])
def test_a_number_of_workers_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--nproc-per-node"):
        count_workers(text)


def test_a_number_of_workers_is_read() -> None:
    assert count_workers("16") == 16


@pytest.mark.parametrize(("code", "shown"), [(0, 0), (3, 3), (-9, 137), (-15, 143)])
def test_an_exit_status_is_shown_as_a_shell_does(code: int, shown: int) -> None:
    assert shell_code(code) == shown
