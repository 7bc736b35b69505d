import pytest
from hypothesis import given
from hypothesis import strategies as st

from tmover.core.rank import Vote
from tmover.errors import ProtocolError
from tmover.worker import vote as votes

any_vote = st.builds(
    Vote,
    step=st.integers(min_value=-1, max_value=2**62),
    good=st.booleans(),
    armed=st.integers(min_value=0, max_value=2**32 - 1),
    checkpoint=st.booleans(),
    holds=st.sampled_from([b"", votes.Holding(2, True, bytes(range(16))).encode()]),
    held=st.integers(min_value=-1, max_value=2**62),
)


@given(vote=any_vote)
def test_a_vote_comes_back_as_it_was(vote: Vote) -> None:
    assert votes.decode(votes.encode(vote)) == vote


@pytest.mark.parametrize("payload", [b"abc", votes.encode(Vote(0, good=True, armed=0)) + b"x"])
def test_what_has_not_the_size_of_a_vote_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"a vote of {len(payload)} bytes"):
        votes.decode(payload)


@pytest.mark.parametrize("holds", [b"", bytes(20), bytes(22)])
def test_a_first_vote_says_what_its_rank_holds(holds: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"in {len(holds)} bytes"):
        votes.Holding.decode(holds)


def test_the_records_of_the_last_two_votes_are_kept_and_no_more() -> None:
    kept = votes.Kept()

    for step in range(5):
        kept.put(step, bytes([step]))

    assert [kept.get(step) for step in range(6)] == [None, None, None, b"\3", b"\4", None]


def test_a_step_voted_on_again_replaces_its_records() -> None:
    kept = votes.Kept()

    kept.put(3, b"first attempt")
    kept.put(3, b"second attempt")

    assert kept.get(3) == b"second attempt"
