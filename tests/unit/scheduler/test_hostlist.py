import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tmover.errors import ConfigError
from tmover.scheduler import hostlist

PREFIXES = st.sampled_from(["n", "node", "rack1-", "gpu.a", "x9y", ""])
NAMES = st.one_of(
    st.builds("{}{}".format, PREFIXES, st.integers(0, 120)),
    st.builds("{}{:03d}".format, PREFIXES, st.integers(0, 1200)),
    st.sampled_from(["login", "head-node", "a.b"]),
)


@given(st.lists(NAMES))
def test_what_is_folded_expands_to_the_same_names(names: list[str]) -> None:
    assert set(hostlist.expand(hostlist.fold(names))) == set(names)


@given(st.lists(NAMES))
def test_each_name_comes_once_and_folding_again_changes_nothing(names: list[str]) -> None:
    expanded = hostlist.expand(hostlist.fold(names))

    assert len(expanded) == len(set(names))
    assert hostlist.fold(expanded) == hostlist.fold(names)


@given(st.integers(1, 50), st.integers(0, 50))
def test_a_run_of_nodes_folds_to_one_range(first: int, more: int) -> None:
    names = [f"node{number}" for number in range(first, first + more + 1)]

    expected = f"node[{first}-{first + more}]" if more else f"node{first}"
    assert hostlist.fold(names) == expected


@given(st.text(alphabet="node0123456789[],-._ x\n", max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    names: list[str] = []
    with contextlib.suppress(ConfigError):
        names = hostlist.expand(text)

    assert all(name and not set(name) & set("[], \n") for name in names)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("a", ["a"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[1,3]x,m2", ["n1x", "n3x", "m2"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ],
)
def test_expands_as_slurm_does(text: str, names: list[str]) -> None:
    assert hostlist.expand(text) == names


@pytest.mark.parametrize(
    "text",
    ["n[3-1]", "n[", "n]", "n[]", "n[a]", "n[1-]", ",", "a,,b", "a b", "n[1-3", "n[[1]]", "é"],
)
def test_refuses_what_is_no_hostlist(text: str) -> None:
    with pytest.raises(ConfigError, match="hostlist"):
        hostlist.expand(text)


@pytest.mark.parametrize("text", ["n[1-999999999]", "n[1-1000]m[1-1000]"])
def test_a_list_of_too_many_names_is_refused_before_it_is_made(text: str) -> None:
    with pytest.raises(ConfigError, match="more than"):
        hostlist.expand(text)


def test_node10_comes_after_node9() -> None:
    names = ["node10", "node9", "login", "node1"]

    assert sorted(names, key=hostlist.natural) == ["login", "node1", "node9", "node10"]
