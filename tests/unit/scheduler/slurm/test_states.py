import pytest
from hypothesis import given
from hypothesis import strategies as st

from tmover.scheduler.interface import NodeState
from tmover.scheduler.slurm.states import JobState, node_state

FLAGS = st.sampled_from(
    ["DRAIN", "NOT_RESPONDING", "MAINTENANCE", "RESERVED", "FAIL", "PLANNED", "POWERING_DOWN",
     "REBOOT_REQUESTED", "CLOUD", "COMPLETING", "SOMETHING_NEW", ""]
)  # fmt: skip


@given(st.text())
def test_any_text_is_a_state(text: str) -> None:
    assert isinstance(JobState.parse(text), JobState)
    assert isinstance(node_state(text), NodeState)


@pytest.mark.parametrize("state", set(JobState) - {JobState.UNKNOWN})
def test_a_job_is_in_one_part_of_its_life(state: JobState) -> None:
    assert JobState.parse(state.value.lower()) is state
    assert [state.is_pending, state.is_running, state.is_ending, state.is_over].count(True) == 1


def test_a_job_in_an_unknown_state_is_neither_running_nor_over() -> None:
    state = JobState.parse("NEVER_HEARD_OF")

    assert state is JobState.UNKNOWN
    assert not any([state.is_pending, state.is_running, state.is_ending, state.is_over])


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("idle", NodeState.IDLE),
        ("IDLE+CLOUD", NodeState.IDLE),
        ("idle+maintenance+reserved", NodeState.IDLE),
        ("idle+not_responding", NodeState.IDLE),
        ("idle+completing", NodeState.ALLOCATED),
        ("allocated", NodeState.ALLOCATED),
        ("allocated$", NodeState.ALLOCATED),
        ("mixed+planned", NodeState.ALLOCATED),
        ("ALLOCATED+MAINTENANCE+RESERVED", NodeState.ALLOCATED),
        ("allocated+not_responding", NodeState.ALLOCATED),
        ("idle*", NodeState.IDLE),
        ("allocated+drain", NodeState.DRAINING),
        ("MIXED+DRAIN+REBOOT_REQUESTED", NodeState.DRAINING),
        ("ALLOCATED+DRAIN+NOT_RESPONDING", NodeState.DRAINING),
        ("allocated+fail", NodeState.DRAINING),
        ("allocated+powering_down", NodeState.DRAINING),
        ("allocated@", NodeState.DRAINING),
        ("idle+completing+drain", NodeState.DRAINING),
        ("draining@", NodeState.DRAINING),
        ("failing", NodeState.DRAINING),
        ("idle+drain", NodeState.DRAINED),
        ("idle+maintenance+drain", NodeState.DRAINED),
        ("idle+fail", NodeState.DRAINED),
        ("idle+reboot_issued", NodeState.DRAINED),
        ("drained*", NodeState.DRAINED),
        ("down", NodeState.FAILING),
        ("DOWN+NOT_RESPONDING", NodeState.FAILING),
        ("down*", NodeState.FAILING),
        ("down+drain", NodeState.FAILING),
        ("error", NodeState.FAILING),
        ("future", NodeState.UNKNOWN),
        ("unknown+drain", NodeState.DRAINED),
        ("", NodeState.UNKNOWN),
    ],
)
def test_base_and_flags_say_what_a_node_is_good_for(text: str, state: NodeState) -> None:
    assert node_state(text) is state


@given(st.sampled_from(["IDLE", "ALLOCATED", "MIXED", "DOWN"]), st.lists(FLAGS))
def test_no_order_of_flags_hides_one(base: str, flags: list[str]) -> None:
    state = node_state("+".join([base, *flags]))

    assert state is node_state("+".join([base, *reversed(flags)]))
    assert (state is NodeState.FAILING) == (base == "DOWN")
    if "DRAIN" in flags:
        assert not state.is_usable
    assert state is not NodeState.DOWN
