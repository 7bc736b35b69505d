import os
import pathlib
import time

import pytest

from tmover.errors import SchedulerError
from tmover.process import marked
from tmover.scheduler.slurm.run import Command, run_command, scrubbed

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


def environment_of(command: Command) -> dict[str, str]:
    lines = run_command(command).out.splitlines()
    return dict(line.split("=", 1) for line in lines)


def test_a_command_s_words_and_code_come_back() -> None:
    argv = ("sh", "-c", "cat; echo bad >&2; exit 3")

    completed = run_command(Command(argv=argv, stdin="in é"))

    assert (completed.code, completed.out, completed.err) == (3, "in é", "bad\n")
    assert not completed.timed_out


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert run_command(Command(argv=("printf", r"a\303|b"))).out == "a\ufffd|b"


def test_at_the_deadline_the_command_and_what_it_started_are_ended() -> None:
    mark = f"{os.getpid()}-{time.monotonic()}"
    env = {"PATH": os.environ["PATH"], "TMOVER_TEST_MARK": mark}
    argv = ("sh", "-c", "sleep 300 & sleep 300")

    completed = run_command(Command(argv=argv, env=env, timeout_s=0.2))

    assert completed.timed_out
    assert marked("TMOVER_TEST_MARK", mark) == set()


def test_a_command_that_does_not_stop_writing_is_ended() -> None:
    with pytest.raises(SchedulerError, match=r"yes wrote more than \d+ bytes, and was ended"):
        run_command(Command(argv=("yes",)))


def test_a_command_that_closes_its_output_and_lives_on_has_the_same_deadline() -> None:
    argv = ("sh", "-c", "exec >/dev/null 2>&1; sleep 300")

    assert run_command(Command(argv=argv, timeout_s=0.2)).timed_out


def test_a_command_that_is_not_installed_is_named() -> None:
    with pytest.raises(SchedulerError, match=r"cannot run no-such-command.*on the PATH"):
        run_command(Command(argv=("no-such-command",)))


def test_what_a_job_or_a_user_s_taste_put_in_is_left_out() -> None:
    environ = {
        "SLURM_JOB_ID": "1",
        "SLURM_CONF": "/etc/slurm.conf",
        "SQUEUE_FORMAT": "%i",
        "SINFO_FORMAT": "%N",
        "SBATCH_ACCOUNT": "a",
        "HOME": "/h",
    }

    assert scrubbed(environ) == {
        "SLURM_CONF": "/etc/slurm.conf",
        "SBATCH_ACCOUNT": "a",
        "HOME": "/h",
    }


def test_output_is_in_english_and_times_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_FORMAT", "%i")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")

    env = environment_of(Command(argv=("env",)))

    assert (env["LC_ALL"], env["SLURM_TIME_FORMAT"]) == ("C", "%s")
    assert "SQUEUE_FORMAT" not in env


def test_a_given_environment_is_taken_as_it_is_and_the_cluster_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_CONF", "/c")
    given = {"PATH": os.environ["PATH"], "A": "b"}

    env = environment_of(Command(argv=("env", "-u", "_"), env=given))

    assert env == {**given, "SLURM_CONF": "/c"}


@NEEDS_ROOT
def test_another_user_gets_nothing_of_root_s(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("SECRET", "root's")
    monkeypatch.chdir(tmp_path)
    argv = ("sh", "-c", "id -un; id -Gn; pwd; exec env")

    completed = run_command(Command(argv=argv, user="nobody"))

    user, groups, cwd, *lines = completed.out.splitlines()
    env = dict(line.split("=", 1) for line in lines)
    assert (user, groups, cwd) == ("nobody", "nogroup", "/")
    assert (env["USER"], env["LOGNAME"]) == ("nobody", "nobody")
    assert env["HOME"] != "/root"
    assert "SECRET" not in env


@NEEDS_ROOT
def test_root_s_home_in_a_given_environment_is_not_passed_on() -> None:
    env = {"HOME": "/root", "USER": "root", "PATH": os.environ["PATH"]}

    found = environment_of(Command(argv=("env",), env=env, user="nobody"))

    assert (found["USER"], found["HOME"] != "/root") == ("nobody", True)


@NEEDS_ROOT
def test_a_command_goes_to_its_directory_as_its_user(tmp_path: pathlib.Path) -> None:
    tmp_path.chmod(0o700)  # root's: whoever went there before becoming the user would get in

    at_home = run_command(Command(argv=("pwd",), cwd="/usr/bin", user="nobody"))
    shut_out = run_command(Command(argv=("pwd",), cwd=str(tmp_path), user="nobody"))

    assert (at_home.code, at_home.out) == (0, "/usr/bin\n")
    assert (shut_out.code, shut_out.out) == (125, "")
    assert "Permission denied" in shut_out.err


def test_a_user_who_does_not_exist_runs_nothing() -> None:
    with pytest.raises(SchedulerError, match="no user no-such-user"):
        run_command(Command(argv=("true",), user="no-such-user"))
