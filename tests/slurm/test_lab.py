"""The lab does to nodes what the other tests rely on, and is clean after each of them."""

from __future__ import annotations

import pathlib

import tmover
from support.lab import Lab


def start(lab: Lab, *options: str, command: str = "exec sleep 600") -> str:
    """Submit a job that sleeps and return its id once it does."""
    argv = ("sbatch", "--parsable", "--no-requeue", *options, "--wrap", command)
    job = lab.run(*argv).stdout.strip()
    lab.wait(lambda: job in [entry.id for entry in lab.squeue()], 20, f"job {job} is known")
    lab.wait(lambda: any(_sleeps(lab, node) for node in lab.nodes), 20, f"job {job} runs")
    return job


def test_a_step_runs_on_every_node_and_each_has_a_name_of_its_own(lab: Lab) -> None:
    shown = lab.run("srun", "-N6", "sh", "-c", "echo $SLURMD_NODENAME $(hostname)").stdout

    pairs = sorted(line.split() for line in shown.splitlines())
    assert [node for node, _ in pairs] == list(lab.nodes)
    assert not lab.isolated or all(node == host for node, host in pairs)


def test_nodes_have_features_and_a_second_partition(lab: Lab) -> None:
    preferred = lab.run("srun", "--prefer=rack2", "-N1", "printenv", "SLURMD_NODENAME").stdout
    standby = lab.run("srun", "-p", "standby", "-N2", "printenv", "SLURMD_NODENAME").stdout

    assert preferred.strip() in {"node4", "node5", "node6"}
    assert sorted(standby.split()) == ["node5", "node6"]


def test_jobs_run_as_another_user(lab: Lab, alice: str) -> None:
    shown = lab.run("srun", "-N1", "sh", "-c", "id -un; echo $HOME", user=alice).stdout

    assert shown.split() == [alice, str(lab.directory / "home")]


def test_jobs_of_another_user_run_this_tmover_and_torch(lab: Lab, alice: str) -> None:
    code = "import ssl, torch, tmover; print(tmover.__version__, torch.__version__)"
    version = lab.run("srun", "-N1", "tmover", "--version", user=alice).stdout
    shown = lab.run("srun", "-N1", "python", "-c", code, user=alice).stdout

    assert shown.split()[0] == tmover.__version__
    assert tmover.__version__ in version


def test_a_node_that_is_switched_off_takes_its_processes_along(machines: Lab) -> None:
    start(machines, "-w", "node2", command="sleep 600 & wait")

    machines.power_off("node2")

    assert machines.strays("node2") == {}
    machines.reset()
    assert machines.run("srun", "-w", "node2", "hostname").stdout == "node2\n"


def test_a_cut_node_goes_on_and_is_not_reached(machines: Lab) -> None:
    start(machines, "-w", "node2")
    before = set(machines.strays("node2"))

    machines.cut("node2")
    cut = _reaches(machines, "node2")
    machines.heal("node2")

    assert before <= set(machines.strays("node2"))
    assert not cut
    machines.wait(lambda: _reaches(machines, "node2"), 10, "node2 is reached")


def test_a_hung_node_stands_still_until_it_is_thawed(machines: Lab) -> None:
    start(machines, "-w", "node3")

    def states() -> set[str]:
        return {_state(pid) for pid in machines.strays("node3")}

    machines.hang("node3")
    machines.wait(lambda: states() == {"T"}, 10, "a signal has stopped them all")  # not at once
    machines.thaw("node3")

    machines.wait(lambda: "T" not in states(), 10, "they all go on")


def test_slurmctld_comes_back_with_its_jobs(lab: Lab) -> None:
    job = start(lab)

    lab.stop_slurmctld()
    answered = lab.run("scontrol", "ping", check=False).returncode
    lab.start_slurmctld()

    assert answered != 0
    assert [entry.id for entry in lab.squeue()] == [job]


def test_a_reboot_kills_what_runs_and_brings_the_node_back(machines: Lab) -> None:
    start(machines, "-w", "node4", command="setsid sleep 600 & sleep 1")
    machines.wait(lambda: machines.squeue() == [], 20, "the job ends")
    orphan = _sleeps(machines, "node4")

    machines.run("scontrol", "reboot", "ASAP", "nextstate=RESUME", "node4")

    assert orphan

    machines.wait(lambda: not machines.strays("node4"), 30, "nothing left on node4")
    machines.wait(lambda: machines.states()["node4"] == "idle", 60, "node4 is idle")


def test_reset_undoes_all_of_it(lab: Lab) -> None:
    start(lab, "-w", "node1")
    lab.run("sbatch", "-N6", "--exclusive", "--wrap", "true")
    lab.run("scontrol", "update", "NodeName=node2", "State=DRAIN", "Reason=x")
    lab.run("scontrol", "update", "NodeName=node3", "State=DOWN", "Reason=x")
    lab.reserve("window", "node4", start="now+120")
    if lab.isolated:
        lab.power_off("node5")
        lab.kill_slurmd("node6")

    lab.reset()

    assert lab.squeue() == []
    assert set(lab.states().values()) == {"idle"}
    assert "window" not in lab.run("scontrol", "show", "reservation").stdout
    assert list(lab.scratch.iterdir()) == []
    assert lab.run("srun", "-N6", "hostname").returncode == 0


def _sleeps(lab: Lab, node: str) -> bool:
    return not lab.isolated or "sleep 600" in lab.strays(node).values()


def _state(pid: int) -> str:
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _reaches(lab: Lab, node: str) -> bool:
    """Return whether `node` can open a connection to slurmctld."""
    probe = f"timeout 1 bash -c 'exec 3<>/dev/tcp/{lab.address}/6817' 2>/dev/null; echo $?"
    return lab.on(node, "bash", "-c", probe) == "0\n"
