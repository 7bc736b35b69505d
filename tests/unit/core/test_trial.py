"""What readings of a loader say about it."""

from __future__ import annotations

from typing import Any

import pytest

from tmover.core.events import Placing
from tmover.core.trial import Check, Mark, Reading, State, Transcript, judge

FIRST = tuple(Mark(samples=f"s{i}", bits=f"b{i}") for i in range(4))
END = tuple(Mark(samples=f"s{i}", bits=f"e{i}") for i in range(4))
OWN = {
    Reading.START: FIRST,
    Reading.AGAIN: FIRST,
    Reading.MIDDLE: FIRST[2:],
    Reading.BACK: FIRST[2:],
    Reading.END: END,
    Reading.BEFORE_END: END,
    Reading.AT_END: END[1:],
}
JOINED = {Reading.START: FIRST, Reading.MIDDLE: FIRST[2:], Reading.END: END}
BETWEEN = "no sample twice or never in a pass"


def owner(**changed: Any) -> Transcript:
    given = {
        "loader": "`DataLoader`",
        "placing": Placing.NUMBER,
        "workers": 2,
        "readings": OWN,
        "passes": {0: (0, 2, 4)},
        "size": 6,
    }
    return Transcript(**{**given, **changed})


def joiner(**changed: Any) -> Transcript:
    return owner(**{"readings": JOINED, "passes": {1: (1, 3, 5)}, **changed})


def named(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def failed(checks: list[Check]) -> set[str]:
    return {check.name for check in checks if check.state is State.FAILED}


def without_numbers(readings: Any) -> Any:
    return {r: tuple(Mark(samples="", bits=m.bits) for m in seen) for r, seen in readings.items()}


def test_readings_that_agree_pass_every_check() -> None:
    checks = judge(owner(), joiner(), ranks=2)

    assert {check.state for check in checks} == {State.OK}
    assert named(checks)["same batches from the start again"].text == "4 batches"


@pytest.mark.parametrize(
    ("reading", "name"),
    [
        (Reading.AGAIN, "same batches from the start again"),
        (Reading.MIDDLE, "same batches from the middle"),
        (Reading.BACK, "same batches after another rank's, and back"),
        (Reading.BEFORE_END, "same batches before the end of a pass"),
        (Reading.AT_END, "same batches behind the end of a pass"),
    ],
)
def test_other_batches_fail_the_check_of_that_reading_alone(reading: Reading, name: str) -> None:
    other = (*OWN[reading][:-1], Mark(samples="other", bits="other"))

    checks = judge(owner(readings={**OWN, reading: other}), joiner(), ranks=2)

    assert failed(checks) == {name}
    assert "other samples" in named(checks)[name].text
    assert named(checks)[name].change


@pytest.mark.parametrize(
    ("reading", "name"),
    [
        (Reading.START, "same batches in another process"),
        (Reading.MIDDLE, "same batches from the middle in another process"),
        (Reading.END, "same batches over the end of a pass in another process"),
    ],
)
def test_a_joiner_that_reads_other_batches_fails(reading: Reading, name: str) -> None:
    other = (Mark(samples="other", bits="other"), *JOINED[reading][1:])

    checks = judge(owner(), joiner(readings={**JOINED, reading: other}), ranks=2)

    assert failed(checks) == {name}
    assert "batch 1 of" in named(checks)[name].text
    assert "`set_rank(rank)`" in named(checks)[name].change


def test_the_same_samples_with_other_bits_are_told_from_other_samples() -> None:
    other = (*FIRST[:1], Mark(samples="s1", bits="other"), *FIRST[2:])

    checks = judge(owner(readings={**OWN, Reading.AGAIN: other}), joiner(), ranks=2)

    assert failed(checks) == {
        "same batches from the start again",
        "what is random in a sample repeats",
    }
    assert (
        "the same samples with other bits"
        in named(checks)["same batches from the start again"].text
    )


@pytest.mark.parametrize(
    ("placing", "what_to_do"),
    [(Placing.NUMBER, "depend on its number alone"), (Placing.REPLAY, "or give it `state_dict`")],
)
def test_what_changed_as_it_was_read_is_named_before_the_usual_advice(
    placing: Placing, what_to_do: str
) -> None:
    change = "the dataset `Counter` changes its `n`"
    other = (Mark(samples="s0", bits="other"), *FIRST[1:])
    known = {"readings": {**OWN, Reading.AGAIN: other}, "placing": placing, "changes": (change,)}

    checks = named(judge(owner(**known), joiner(changes=(change,)), ranks=2))

    for name in ("same batches from the start again", "what is random in a sample repeats"):
        advice = checks[name].change
        assert advice.startswith(f"{change} as it is read, and no joiner is handed that: let ")
        assert what_to_do in advice
        assert "draw what is random" in advice
    assert not checks["same batches in another process"].change


def test_what_keeps_something_unseen_is_thought_of() -> None:
    other = (Mark(samples="s0", bits="other"), *FIRST[1:])

    checks = judge(owner(readings={**OWN, Reading.AGAIN: other}), joiner(), ranks=2)

    advice = named(checks)["same batches from the start again"].change
    assert "keep nothing from one sample to the next (a cache, a counter" in advice


def test_a_state_that_says_too_little_is_blamed_for_what_follows_it() -> None:
    readings = {**without_numbers(OWN), Reading.MIDDLE: (Mark(samples="", bits="x"),) * 2}

    checks = judge(owner(readings=readings, placing=Placing.STATE), None, ranks=2)

    assert failed(checks) == {"same batches from the middle"}
    assert "`state_dict` say all" in named(checks)["same batches from the middle"].change


def test_an_error_is_a_failure_in_its_own_words() -> None:
    readings = {r: seen for r, seen in OWN.items() if r is not Reading.BACK}
    errors = {Reading.BACK: "StateError: no"}

    checks = judge(owner(readings=readings, errors=errors), joiner(), ranks=2)

    assert failed(checks) == {"same batches after another rank's, and back"}
    assert named(checks)["same batches after another rank's, and back"].text == "StateError: no"


def test_what_was_not_read_is_skipped_with_the_reason() -> None:
    checks = named(judge(owner(readings={Reading.START: FIRST}), None, ranks=1))

    assert checks["same batches over the end of a pass in another process"].state is State.SKIPPED
    assert "`--most`" in checks["same batches before the end of a pass"].text
    assert "one rank only" in checks["same batches after another rank's, and back"].text


@pytest.mark.parametrize("refused", [{"owner": True}, {"owner": False}])
def test_what_a_job_would_refuse_fails(refused: dict[str, bool]) -> None:
    mine, theirs = ("why", "") if refused["owner"] else ("", "why")

    checks = judge(owner(refusal=mine), joiner(refusal=theirs), ranks=2)

    assert failed(checks) == {"can be handed over"}
    assert named(checks)["can be handed over"].text == "why"


@pytest.mark.parametrize(
    ("mine", "theirs", "dropped", "state", "words"),
    [
        ((0, 2, 4), (1, 3, 5), 0, State.OK, "6 samples"),
        ((0, 2, 4), (1, 3, 0), 0, State.FAILED, "1 come twice or more and 1 never"),
        ((0, 1, 2), (1, 3, 0), 0, State.FAILED, "2 come twice or more and 2 never"),
        ((0, 2, 4), (1, 3, 5, 0), 0, State.OK, "1 twice so that all ranks have as many"),
        ((0, 2), (1, 3), 1, State.OK, "2 left out at the end"),
        ((0, 2), (1, 3), 0, State.FAILED, "2 never"),
        ((0, 1), (0, 1), 0, State.OK, "every rank reads the same samples"),
    ],
)
def test_ranks_have_each_sample_once_together(
    mine: tuple[int, ...], theirs: tuple[int, ...], dropped: int, state: State, words: str
) -> None:
    first = owner(passes={0: mine}, dropped=dropped)

    check = named(judge(first, joiner(passes={1: theirs}), ranks=2))[BETWEEN]

    assert (check.state, words in check.text) == (state, True), check


def test_with_ranks_that_were_not_tried_nothing_is_said_of_the_pass() -> None:
    check = named(judge(owner(), joiner(), ranks=3))[BETWEEN]

    assert check.state is State.SKIPPED
