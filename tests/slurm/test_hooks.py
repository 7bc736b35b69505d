"""What sites install: hooks of Slurm, templates, units. Each does on a real Slurm its job."""

from __future__ import annotations

import configparser
import contextlib
import pathlib
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from support.lab import Lab

ROOT = pathlib.Path(__file__).parents[2]
HOOKS = ROOT / "slurm"
TEMPLATES = [*sorted(HOOKS.glob("templates/*.sbatch")), *sorted(ROOT.glob("examples/*.sbatch"))]
UNITS = [ROOT / "conf" / "tmover.service", ROOT / "conf" / "user" / "tmover.service"]

SLEEP = "sleep 600"
LEAVE_A_WORKER = (
    "TMOVER_JOB=j TMOVER_AGENT=ipc:///x setsid -f sleep 600; setsid -f sleep 601; sleep 1"
)
"""A job that leaves a process of tmover, and one that is none of it."""


def wrapper(lab: Lab, hook: str, **settings: str) -> pathlib.Path:
    """Return a program that runs `hook` with its own hooks.conf, which is read as on a site."""
    conf, program = lab.scratch / "hooks.conf", lab.scratch / hook
    lines = [f"{key}='{value}'" for key, value in settings.items()]
    conf.write_text("\n".join([f"SLURM_CONF={lab.conf}", *lines, ""]))
    program.write_text(f'#!/bin/sh\nTMOVER_HOOKS_CONF={conf} exec {HOOKS / hook} "$@"\n')
    program.chmod(0o755)
    return program


def check_once(lab: Lab, node: str, **settings: str) -> None:
    """Run the health check on `node` as slurmd would."""
    program = wrapper(lab, "health-check.sh", **settings)
    lab.run("env", "-i", f"SLURMD_NODENAME={node}", str(program))


def reason(lab: Lab, node: str) -> str:
    return lab.run("sinfo", "-h", "-n", node, "-p", "main", "-o", "%E").stdout.strip()


def leave_a_worker(lab: Lab, node: str) -> None:
    """Run a job on `node` that ends and leaves two processes."""
    lab.run("sbatch", "-w", node, "--wait", "--wrap", LEAVE_A_WORKER)


def sleepers(lab: Lab, node: str) -> list[str]:
    return sorted(line for line in lab.strays(node).values() if line.startswith("sleep 60"))


def test_a_health_check_that_fails_drains_the_node_and_says_why(lab: Lab) -> None:
    check = 'test "$SLURMD_NODENAME" != node3 || { echo; echo "GPU 3 fell off the bus"; false; }'
    program = wrapper(lab, "health-check.sh", CHECK=check)

    with lab.configured(f"HealthCheckProgram={program}", "HealthCheckInterval=1"):
        lab.wait(lambda: "drain" in lab.states()["node3"], 20, "node3 is drained")

    assert reason(lab, "node3") == "tmover: health check: GPU 3 fell off the bus"
    assert {lab.states()[node] for node in lab.nodes if node != "node3"} == {"idle"}


def test_a_health_check_that_hangs_is_one_that_fails(lab: Lab) -> None:
    check_once(lab, "node1", CHECK="exec sleep 60", CHECK_S="0.2")

    assert reason(lab, "node1") == "tmover: health check: no answer within 0.2 s"


def test_a_health_check_without_a_word_gives_its_status(lab: Lab) -> None:
    check_once(lab, "node1", CHECK="exit 7")

    assert reason(lab, "node1") == "tmover: health check: status 7"


def test_a_health_check_leaves_the_reason_of_whoever_drained_the_node_before(lab: Lab) -> None:
    lab.run("scontrol", "update", "NodeName=node2", "State=DRAIN", "Reason=fan replaced at 5")

    check_once(lab, "node2", CHECK="false")

    assert reason(lab, "node2") == "fan replaced at 5"


def test_the_epilog_kills_what_a_job_s_tmover_left_and_nothing_else(machines: Lab) -> None:
    with machines.configured(f"Epilog={HOOKS / 'epilog.sh'}"):
        leave_a_worker(machines, "node2")
        machines.wait(lambda: machines.states()["node2"] == "idle", 20, "the epilog is over")

    assert sleepers(machines, "node2") == ["sleep 601"]


def test_the_epilog_leaves_another_job_s_processes_alone(machines: Lab) -> None:
    other = "TMOVER_JOB=other exec sleep 600"
    machines.run("sbatch", "-w", "node2", "--no-requeue", "--wrap", other)
    machines.wait(lambda: sleepers(machines, "node2") == [SLEEP], 20, "the other job runs")

    with machines.configured(f"Epilog={HOOKS / 'epilog.sh'}"):
        machines.run("sbatch", "-w", "node2", "--wait", "--wrap", "true")
        machines.wait(lambda: len(machines.squeue()) == 1, 20, "the epilog is over")

    assert sleepers(machines, "node2") == [SLEEP]


def test_the_prolog_lets_jobs_through_and_kills_what_no_job_step_owns(machines: Lab) -> None:
    leave_a_worker(machines, "node2")
    assert sleepers(machines, "node2") == [SLEEP, "sleep 601"]

    with machines.configured(f"Prolog={HOOKS / 'prolog.sh'}"):
        shown = machines.run("srun", "-w", "node2", "hostname").stdout

    assert shown == "node2\n"
    assert sleepers(machines, "node2") == ["sleep 601"]


def test_the_prolog_leaves_running_jobs_alone(machines: Lab) -> None:
    running = "TMOVER_JOB=j exec sleep 600"
    machines.run("sbatch", "-w", "node2", "--no-requeue", "--wrap", running)
    machines.wait(lambda: sleepers(machines, "node2") == [SLEEP], 20, "a job runs")

    with machines.configured(f"Prolog={HOOKS / 'prolog.sh'}"):
        machines.run("srun", "-w", "node2", "hostname")

    assert sleepers(machines, "node2") == [SLEEP]


@pytest.fixture
def trigger(lab: Lab) -> Iterator[pathlib.Path]:
    """A strigger on nodes that go down; yields the file that shows what tmover was asked."""
    asked, tmover = lab.scratch / "asked", lab.scratch / "tmover"
    tmover.write_text(f'#!/bin/sh\necho "$TMOVER_STATE" "$@" >>{asked}\n')
    tmover.chmod(0o755)
    program = wrapper(lab, "strigger.sh", TMOVER=str(tmover), TMOVER_STATE="/there")
    argv = ("strigger", "--set", "--node", "--down", "--flags=PERM", f"--program={program}")
    lab.run(*argv)
    yield asked
    lab.run("strigger", "--clear", "--quiet", "--user=root", check=False)


def test_strigger_tells_tmover_of_all_nodes_that_went_down_at_once(
    lab: Lab, trigger: pathlib.Path
) -> None:
    lab.run("scontrol", "update", "NodeName=node[3,5]", "State=DOWN", "Reason=x")

    lab.wait(trigger.exists, 40, "tmover is asked")
    (line,) = lab.wait(lambda: _lines(trigger, 1), 10, "it is asked once")
    assert line == "/there maintenance run --wait 0 --node node[3,5]"


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_a_template_is_accepted_and_holds_what_tmover_needs(
    lab: Lab, template: pathlib.Path
) -> None:
    subprocess.run(["bash", "-n", str(template)], check=True)
    accepted = lab.run("sbatch", "--test-only", str(template)).stderr

    assert "to start at" in accepted
    text = template.read_text().replace("\\\n", "")
    assert "srun --no-kill --kill-on-bad-exit=0 --output=%x.%j.%N.log " in text
    assert "tmover run --nproc-per-node" in text
    assert text.rstrip().endswith("\nexec tmover wait --srun $!")


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: str(path.relative_to(ROOT / "conf")))
def test_a_unit_starts_the_controller_and_lets_job_steps_live(unit: pathlib.Path) -> None:
    parser = configparser.ConfigParser(strict=True, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(unit)

    assert parser["Service"]["ExecStart"].split()[1:2] == ["controller"]
    assert parser["Service"]["KillMode"] == "process"
    assert parser["Install"]["WantedBy"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: str(path.relative_to(ROOT / "conf")))
def test_systemd_finds_no_fault_with_a_unit(unit: pathlib.Path, tmp_path: pathlib.Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    program = tmp_path / "tmover"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    copy = tmp_path / "tmover.service"
    text = unit.read_text()
    for path in ("/usr/local/bin/tmover", "%h/.local/bin/tmover"):
        text = text.replace(path, str(program))
    copy.write_text(text)

    scope = "--user" if unit.parent.name == "user" else "--system"
    argv = [analyze, "verify", scope, "--man=no", str(copy)]
    said = subprocess.run(argv, capture_output=True, text=True, check=False)

    about = [line for line in said.stderr.splitlines() if "tmover" in line]
    assert about == []


def test_cron_s_file_runs_maintenance_as_root_and_has_no_dot_in_its_name() -> None:
    file = ROOT / "conf" / "cron.d" / "tmover"
    lines = [line for line in file.read_text().splitlines() if line and line[0] not in "#"]

    commands = [line for line in lines if "=" not in line.split()[0]]
    assert "." not in file.name
    assert [command.split()[5:] for command in commands] == [
        ["root", "tmover", "maintenance", "run", "--lead", "30m"]
    ]


def _lines(path: pathlib.Path, count: int) -> list[str]:
    """Return the lines of a file once there are `count`."""
    with contextlib.suppress(FileNotFoundError):
        lines = path.read_text().splitlines()
        return lines if len(lines) >= count else []
    return []
