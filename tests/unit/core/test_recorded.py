import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tmover.core.recorded import Fingerprint, biggest, misfit, recorders

OWN = Fingerprint(tmover="1", torch="2", nnodes=2, nproc=2, schema={"model": "m"})


def test_what_fits_is_used() -> None:
    assert misfit(OWN, OWN) == ""


def test_what_is_not_known_before_the_loop_is_compared_later() -> None:
    assert misfit(OWN, msgspec.structs.replace(OWN, schema={})) == ""


def test_all_tracked_names_that_differ_are_named() -> None:
    other = msgspec.structs.replace(OWN, schema={"model": "x", "optimizer": "o"})

    assert misfit(OWN, other) == "tracked `model`, `optimizer` differ"


@given(st.lists(st.sampled_from([b"a", b"b", b"c"])))
def test_the_lowest_rank_of_each_role_records_for_all_of_it(roles: list[bytes]) -> None:
    by_rank = recorders(roles)

    assert len(by_rank) == len(roles)
    for rank, recorder in enumerate(by_rank):
        assert roles[recorder] == roles[rank]
        assert recorder == min(r for r, role in enumerate(roles) if role == roles[rank])


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 100)), st.integers(0, 300))
def test_what_is_kept_is_within_the_limit_and_nothing_is_left_out_in_vain(
    sizes: dict[str, int], limit: int
) -> None:
    out = biggest(sizes, limit)

    kept = sum(size for name, size in sizes.items() if name not in out)
    assert kept <= limit
    if out:
        assert kept + min(sizes[name] for name in out) > limit
        assert min(sizes[name] for name in out) >= max(
            (size for name, size in sizes.items() if name not in out), default=0
        )
