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
)


@given(vote=any_vote, record=st.binary())
def test_a_vote_and_the_records_behind_it_come_back_as_they_were(vote: Vote, record: bytes) -> None:
    assert votes.decode(votes.encode(vote) + record) == (vote, record)


def test_a_short_vote_is_refused() -> None:
    with pytest.raises(ProtocolError, match="a vote of 3 bytes"):
        votes.decode(b"abc")


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
