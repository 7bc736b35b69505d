"""Our hostlists against Slurm's own. `scontrol` asks nobody for these, so one call does many."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.lab import Lab
from tmover.scheduler import hostlist

pytestmark = pytest.mark.slurm

PREFIXES = st.sampled_from(["n", "node", "rack1-", "gpu.a", "x9y"])
NUMBERED = st.one_of(
    st.builds("{}{}".format, PREFIXES, st.integers(0, 120)),
    st.builds("{}{:03d}".format, PREFIXES, st.integers(0, 1200)),
)
NAMES = st.one_of(NUMBERED, st.sampled_from(["login", "head-node"]))
RANGES = st.one_of(
    st.builds("{}".format, st.integers(0, 20)),
    st.builds("{:02d}".format, st.integers(0, 99)),
    st.tuples(st.integers(0, 30), st.integers(0, 12)).map(lambda p: f"{p[0]}-{p[0] + p[1]}"),
    st.tuples(st.integers(0, 99), st.integers(0, 12)).map(
        lambda p: f"{p[0]:03d}-{p[0] + p[1]:03d}"
    ),
)
BRACKETS = st.lists(RANGES, min_size=1, max_size=3).map(lambda ranges: f"[{','.join(ranges)}]")
LISTS = st.lists(
    st.one_of(
        NAMES,
        st.builds("{}{}".format, st.sampled_from(["n", "gpu-"]), BRACKETS),
        st.builds("r{}n{}".format, BRACKETS, BRACKETS),
    ),
    min_size=1,
    max_size=3,
).map(",".join)
MANY = settings(max_examples=8, suppress_health_check=list(HealthCheck), deadline=None)
END = "end-of-list"


@MANY
@given(lists=st.lists(LISTS, min_size=1, max_size=40))
def test_slurm_expands_a_hostlist_to_the_same_names(lab: Lab, lists: list[str]) -> None:
    together = ",".join(f"{each},{END}" for each in lists)

    names = lab.run("scontrol", "show", "hostnames", together).stdout.split()

    assert names == hostlist.expand(together)
    assert names.count(END) == len(lists)


@MANY
@given(names=st.lists(NAMES, min_size=1, max_size=60))
def test_slurm_expands_what_we_fold_to_the_same_names(lab: Lab, names: list[str]) -> None:
    seen = lab.run("scontrol", "show", "hostnames", hostlist.fold(names)).stdout.split()

    assert sorted(seen) == sorted(set(names))


@MANY
@given(names=st.lists(NAMES, min_size=1, max_size=60, unique=True))
def test_we_expand_what_slurm_folds_to_the_same_names(lab: Lab, names: list[str]) -> None:
    folded = lab.run("scontrol", "show", "hostlist", ",".join(names)).stdout.strip()

    assert hostlist.expand(folded) == names
