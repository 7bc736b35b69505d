"""Admin pools: nodes kept free for standbys by a reservation, which Slurm fills up again.

The commands are those of docs/slurm.md.
"""

from __future__ import annotations

import pathlib
import re
import shlex

import pytest

from support.lab import Lab

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "slurm.md"


def create(lab: Lab, flags: str, user: str) -> set[str]:
    """Make the reservation of the page with these flags, for `user`; return its nodes."""
    text = PAGE.read_text().replace("\\\n", " ")
    [command] = re.findall(rf"^scontrol create reservation .*Flags={flags}$", text, re.MULTILINE)
    lab.run(*shlex.split(command.replace("Users=alice,bob", f"Users={user}")))
    return reserved(lab)


def reserved(lab: Lab) -> set[str]:
    shown = lab.run("scontrol", "-o", "show", "reservation", "tmover").stdout
    nodes = shown.partition(" Nodes=")[2].split()[0]
    return set(lab.run("scontrol", "show", "hostnames", nodes).stdout.split())


def take(lab: Lab, user: str) -> str:
    """Have a standby of `user` take a node of the reservation; return the node."""
    sleep = ("--no-requeue", "--exclusive", "-N1", "--wrap", "exec sleep 600")
    argv = ("sbatch", "--parsable", "--reservation=tmover", *sleep)
    job = lab.run(*argv, user=user).stdout.strip()

    def where() -> str:
        return next((each.nodes for each in lab.squeue() if each.id == job), "")

    return lab.wait(where, 30, f"standby {job} has a node")


@pytest.mark.parametrize("flags", ["REPLACE", "REPLACE_DOWN"])
def test_a_spare_that_is_drained_is_replaced(lab: Lab, alice: str, flags: str) -> None:
    before = create(lab, flags, alice)
    sick = min(before)

    lab.run("scontrol", "update", f"NodeName={sick}", "State=DRAIN", "Reason=x")

    lab.wait(lambda: reserved(lab) - before, 30, "another node")
    assert len(before) == 2
    assert len(reserved(lab)) == 2
    assert sick not in reserved(lab)


def test_a_consumed_spare_is_replaced_by_another_idle_node(lab: Lab, alice: str) -> None:
    before = create(lab, "REPLACE", alice)

    taken = take(lab, alice)

    assert taken in before
    lab.wait(lambda: taken not in reserved(lab), 40, "another spare")
    assert len(reserved(lab)) == 2


def test_a_consumed_spare_stays_in_a_pool_that_replaces_only_what_is_down(
    lab: Lab, alice: str
) -> None:
    before = create(lab, "REPLACE_DOWN", alice)

    taken = take(lab, alice)
    sick = min(before - {taken})
    lab.run("scontrol", "update", f"NodeName={sick}", "State=DRAIN", "Reason=x")

    lab.wait(lambda: sick not in reserved(lab), 30, "the drained one is replaced")
    assert taken in reserved(lab)


def test_other_jobs_do_not_get_the_spares(lab: Lab, alice: str) -> None:
    spares = create(lab, "REPLACE", alice)

    got = lab.run("srun", "-N4", "printenv", "SLURMD_NODENAME", user=alice).stdout.split()

    assert set(got) == set(lab.nodes) - spares


def test_a_user_without_rights_can_make_no_reservation_and_drain_no_node(
    lab: Lab, alice: str
) -> None:
    for words in (
        "create reservation ReservationName=x Users=root NodeCnt=1 StartTime=now Duration=10",
        "update NodeName=node1 State=DRAIN Reason=x",
    ):
        refused = lab.run("scontrol", *words.split(), user=alice, check=False)

        assert refused.returncode != 0
        assert "Invalid user id" in refused.stderr
