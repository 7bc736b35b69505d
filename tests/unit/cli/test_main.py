import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from tmover.agent.launcher import Launcher, WorkerCommand
from tmover.cli.main import COMMANDS, tmover
from tmover.errors import ConfigError


def run(*arguments: str, **env: str) -> tuple[int, str]:
    """Return the exit code and what was printed, on both streams."""
    done = CliRunner().invoke(
        tmover, arguments, prog_name="tmover", env={"TMOVER_JOB": None, **env}
    )
    return done.exit_code, done.output


@pytest.fixture(autouse=True)
def mask() -> Iterator[None]:
    """Keep what `tmover run` blocks from the tests that follow."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.fixture(autouse=True)
def here(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMOVER_STATE", str(tmp_path / "state"))
    (tmp_path / "train.py").write_text("raise SystemExit('was run')")


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "demo"])
def test_every_command_has_help(command: str) -> None:
    code, output = run(command, "--help")

    assert code == 0
    assert output.startswith(f"Usage: tmover {command}")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("verify", "--nodes", "x"), "'--nodes': 'x' is not a whole number from 2 on."),
        (("verify", "--nodes", "1"), "'--nodes': '1' is not a whole number from 2 on."),
        (("verify", "--standby", "0"), "'--standby': '0' is not a whole number from 1 on."),
        (("verify", "--seed", "1.5"), "'--seed': '1.5' is not a whole number from 0 on."),
        (("submit", "--local", "--nodes", ""), "'--nodes': '' is not a whole number from 1 on."),
        (("check-loader", "--ranks", "9999"), "'9999' is not a whole number from 1 to 4096."),
        (("demo", "--steps", "x"), "'--steps': 'x' is not a whole number from 300 on."),
        (("wait", "--srun", "-1"), "'--srun': '-1' is not a whole number from 1 on."),
    ],
)
def test_what_is_no_number_is_told_which_would_do(arguments: tuple[str, ...], said: str) -> None:
    code, output = run(*arguments)

    assert code == 2
    assert said in output


@pytest.mark.parametrize(
    "command", [["run"], ["submit", "--local"], ["verify"], ["check-loader"]], ids=" ".join
)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"import os\n\ndef train(:\n", "the script 'train.py', line 3: SyntaxError: "),
        (b"return 1\n", "the script 'train.py', line 1: SyntaxError: 'return' outside function"),
        (b"x = '\xff'\n", "the script 'train.py'"),
        (b"x = 1\0\n", "null bytes"),
    ],
)
def test_a_script_that_is_no_python_ends_before_anything_is_started(
    command: list[str], text: bytes, said: str, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "train.py").write_bytes(text)

    code, output = run(*command, "train.py")

    assert code == 2
    assert len(output.splitlines()) == 1
    assert said in output
    assert not (tmp_path / "state").exists()


def test_a_script_that_only_warns_is_run(tmp_path: pathlib.Path) -> None:
    (tmp_path / "train.py").write_text("print('\\d' is 'd')\n")

    _, output = run("run", "train.py")

    assert "no job to join" in output
    assert len(output.splitlines()) == 1


def test_an_agent_does_not_die_of_a_signal_for_its_workers_before_it_listens() -> None:
    blocked: set[int] = set()

    def make_launcher(command: WorkerCommand) -> Launcher:
        blocked.update(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        raise ConfigError(command.script)

    CliRunner().invoke(tmover, ["run", "train.py"], env={"TMOVER_JOB": "1"}, obj=make_launcher)

    assert blocked == {signal.SIGUSR1, signal.SIGUSR2}


def test_help_lists_the_commands_and_the_exit_codes() -> None:
    code, output = run("--help")

    assert code == 0
    assert all(f"\n  {name} " in output for name in COMMANDS if name != "demo")
    assert "Exit codes" in output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["run"], "no script given"),
        (["run", "nope.py"], "there is no script 'nope.py'"),
        (["run", "."], "there is no script '.'"),
        (["run", "-m", "no_such_module.x"], "there is no module 'no_such_module.x'"),
        (["run", "--bogus", "train.py"], "No such option '--bogus'. See `tmover run --help`."),
        (["run", "--nproc-per-node"], "requires an argument"),
        (["run", "--no-python", "train.py"], "--no-python: a rank of tmover lives in"),
        (["run", "--no_python", "train.py"], "--no-python"),
        (["run", "--run-path", "train.py"], "--run-path"),
        (["run", "--virtual-local-rank", "train.py"], "--virtual-local-rank"),
        (["run", "train.py"], "no job to join: neither TMOVER_JOB nor SLURM_JOB_ID is set"),
        (["run", "--config", "no.toml", "train.py"], "no.toml"),
        (["submit", "train.py"], "add --local"),
        (["submit", "--local"], "no script given"),
        (["submit", "--local", "--nodes", "0", "train.py"], "'0' is not a whole number from 1 on"),
        (["submit", "--local", "--nproc-per-node", "0", "train.py"], "--nproc-per-node 0"),
        (["submit", "--local", "nope.py"], "there is no script"),
        (["migrate"], "Missing argument 'NODE'"),
        (["drain", "--reason", "x"], "Missing argument 'NODE...'"),
        (["drain", "node1"], "Missing option '--reason'"),
        (["drain", "node[1", "--reason", "x"], "cannot read 'node[1'"),
        (["drain", "", "--reason", "x"], "no node is named"),
        (["undrain", "node[2-1]"], "'2-1' is not a range"),
        (["undrain", "\udcff"], "is not UTF-8"),
        (["maintenance", "run", "--lead", "soon"], "'soon' is no duration; write for example 90s"),
        (["maintenance", "run", "--node", "n[x]"], "cannot read 'n[x]'"),
        (["wait", "--timeout", "1.5h"], "'1.5h' is no duration"),
        (["maintenance", "bogus"], "No such command 'bogus'. See `tmover maintenance --help`."),
        (["status", "--state", ""], "no directory is named"),
        (["controller", "--state", "/dev/null/x"], "cannot use the directory /dev/null/x"),
        (["submit", "--local", "--state", "/dev/null/x", "train.py"], "cannot use the directory"),
        (["submit", "--local"], "no script given; see `tmover submit --help`"),
        (["verify"], "no script given; see `tmover verify --help`"),
        (["verify", "nope.py"], "there is no script 'nope.py'"),
        (["verify", "--nodes", "1", "train.py"], "'1' is not a whole number from 2 on"),
        (["verify", "--standby", "0", "train.py"], "'0' is not a whole number from 1 on"),
        (["verify", "--faults", "kill", "train.py"], "--faults: cannot read 'kill'"),
        (["verify", "--faults", "raise:point=in_vote", "train.py"], "is no loss"),
        (["status", "\udcff"], r"'\udcff' is not UTF-8"),
        (["migrate", "\udcff"], "is not UTF-8"),
        (["cancel", "--reason", "\udcff"], "is not UTF-8"),
        (["submit", "--local", "train.py", "\udcff"], "is not UTF-8"),
        (["bogus"], "No such command 'bogus'"),
        (["--bogus"], "No such option '--bogus'. See `tmover --help`."),
    ],
)
def test_what_was_typed_wrong_is_one_line_and_exit_code_2(
    arguments: list[str], complaint: str
) -> None:
    code, output = run(*arguments)

    assert code == 2
    assert complaint in output
    assert output.startswith("error: ")
    assert output.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [["status"], ["status", "1"], ["migrate", "n"], ["cancel"], ["wait", "--patience", "0"]],
)
def test_without_a_controller_a_command_says_how_to_start_one(command: list[str]) -> None:
    code, output = run(*command)

    assert code == 4
    assert output.startswith("error: no controller runs on")
    assert "`tmover controller --state" in output
    assert output.count("\n") == 1


def test_flags_for_nodes_are_ignored_aloud() -> None:
    code, output = run("run", "--nnodes", "4", "--rdzv_backend=c10d", "--standalone", "train.py")

    assert code == 2  # there is no job
    first = output.splitlines()[0]
    assert first == (
        "tmover: ignored --nnodes, --rdzv-backend, --standalone: the controller decides that"
    )


def test_a_bad_environment_is_named() -> None:
    code, output = run("run", "train.py", TMOVER_JOB="1", TMOVER_AGENT_HEARTBAT_S="1")

    assert code == 2
    assert "did you mean TMOVER_AGENT_HEARTBEAT_S" in output


def as_process(*arguments: str, redirect: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command as a shell would."""
    line = f'exec "$0" -m tmover "$@" {redirect}'
    argv = ["sh", "-c", line, sys.executable, *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)


def test_output_that_cannot_be_written_is_one_line() -> None:
    done = as_process("--help", redirect="> /dev/full")

    assert done.returncode == 1
    assert done.stderr == "error: the output could not be written: no space left on device\n"


def test_a_closed_stderr_ends_nothing() -> None:
    done = as_process("--help", redirect="2>&-")

    assert done.returncode == 0
    assert done.stdout.startswith("Usage: tmover")


def test_an_interrupt_while_it_is_imported_is_one_line(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ['PYTHONPATH']}")

    done = as_process("--help")

    assert (done.returncode, done.stderr) == (130, "interrupted\n")
