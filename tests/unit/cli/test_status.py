import msgspec

from tmover.cli.status import render
from tmover.core.warmth import Warmth
from tmover.wire import JobStatus, MoveStatus, SlotStatus, StandbyStatus, WaitStatus

STATUS = JobStatus(
    job="3",
    owner="me",
    phase="preparing",
    epoch=4,
    step=120,
    world_size=4,
    slots=(
        SlotStatus(slot=0, node="node1", agent="node1-aa", state="training", step=120, heard_s=0.2),
        SlotStatus(slot=1, node="", agent="", state="vacant", step=None, heard_s=None),
    ),
    standbys=(
        StandbyStatus(
            node="node12",
            agent="node12-bb",
            state="warm",
            heard_s=12.0,
            slot=1,
            takes=(1,),
            rehearsed=(0, 1),
            rebuilds="`rank` is another",
        ),
    ),
    move=MoveStatus(phase="preparing", leaver="node1", joiner="node12", epoch=5),
    notes=("12:00:00 hello", "12:00:01 node1 is to be left: fan"),
    outcome="",
)

SCREEN = """\
JOB 3  preparing  step 120  epoch 4  ranks 4  owner me

SLOT  NODE    STATE     STEP  HEARD  AGENT
0     node1   training  120   0.2s   node1-aa
1     -       vacant    -     -
(1)   node12  warm      -     12.0s  node12-bb

move: preparing in epoch 5, node1 to node12

standby node12: takes slot 1 as it is, slot 0 after a rehearsal: `rank` is another

  12:00:00 hello
  12:00:01 node1 is to be left: fan"""


def test_what_would_move_the_cursor_is_written_out() -> None:
    slot = msgspec.structs.replace(STATUS.slots[0], node="node\x1b[2J\n")
    shown = render(msgspec.structs.replace(STATUS, slots=(slot,), notes=("a\rb \udcff",)))

    assert "node\\x1b[2J\\n  training" in shown
    assert shown.endswith("  a\\rb \\udcff")


def test_a_move_that_is_only_asked_for_is_in_no_epoch() -> None:
    move = MoveStatus(phase="requested", leaver="node1", joiner="", epoch=0)

    assert "\nmove: requested, node1 is to be left\n" in render(
        msgspec.structs.replace(STATUS, move=move)
    )


def test_a_node_that_is_slower_than_its_peers_is_named() -> None:
    slow = "n3 is 1.8 x slower than its peers since 14:02: `tmover migrate n3` would move it"

    assert f"\nslow: {slow}\n" in render(msgspec.structs.replace(STATUS, slow=slow))


def test_who_keeps_the_others_waiting_is_named() -> None:
    late = WaitStatus(rank=3, node="node2", per_step_s=0.3127, steps=32, is_straggler=True)
    usual = WaitStatus(rank=1, node="node1", per_step_s=0.01, steps=32)
    why = "no step for 20 s of 60 s, all wait for rank 3"

    shown = render(msgspec.structs.replace(STATUS, waits=(late, usual), suspect=why))

    straggler = "straggler: rank 3 on node2, others wait 0.313 s per step in the last 32"
    assert f"\n\nsuspect: {why}\n\n{straggler}\n\n" in shown
    assert "rank 1" not in shown


def test_a_loader_that_does_not_go_straight_to_its_position_is_said_to() -> None:
    placed = msgspec.structs.replace(STATUS, placing="state")
    replayed = msgspec.structs.replace(STATUS, placing="replay")

    assert "\n\na joiner's loader: placed by the state it has of its own\n" in render(placed)
    assert "\n\na joiner's loader: fast-forwarded: all before its position" in render(replayed)
    assert render(msgspec.structs.replace(STATUS, placing="number")) == SCREEN


def test_what_a_standby_rehearsed_with_is_said() -> None:
    (standby,) = STATUS.standbys
    told = msgspec.structs.replace(standby, recorded="recorded values of rank 0")

    shown = render(msgspec.structs.replace(STATUS, standbys=(told,)))

    assert "standby node12 rehearsed with recorded values of rank 0" in shown
    assert "rehearsed" not in render(STATUS)


def test_where_a_lost_rank_s_state_comes_from_is_said() -> None:
    def source(redundancy: str, copies: int) -> str:
        shown = msgspec.structs.replace(STATUS, redundancy=redundancy, copies=copies)
        return next(line for line in render(shown).splitlines() if "a lost rank's" in line)

    assert source("replicas", 0).endswith("state: each rank has a replica on another node")
    assert source("copies", 1).endswith("state: copies on another node, to which all return")
    assert source("copies", 2).endswith("state: copies on 2 other nodes, to which all return")


def test_a_standby_that_takes_every_slot_has_nothing_to_rehearse() -> None:
    ready = StandbyStatus(node="n", agent="n-a", state="warm", slot=1, takes=(0, 1))

    shown = render(msgspec.structs.replace(STATUS, standbys=(ready,)))

    assert "\nstandby n: takes slots 0-1 as it is\n" in shown


def test_what_of_a_standby_is_warm_is_said_with_its_age() -> None:
    warm = Warmth(
        step_s=0.0123, modules=1234, state_bytes=3 << 20, graphs=2, loaders=4, links=3, proofs=7
    )
    ready = StandbyStatus(
        node="n", agent="n-a", state="warm", slot=1, takes=(0, 1), warmth=warm, warm_s=61.0
    )

    shown = render(msgspec.structs.replace(STATUS, standbys=(ready,)))

    assert (
        "\nstandby n: a shadow step in 12.3 ms, 1234 modules imported, 3.0 MiB of state, "
        "2 compiled graphs, 4 loader workers, 3 connections on its node; seen 61.0s ago, "
        "proven again 7 times\n"
    ) in shown


def test_a_status_is_a_plain_table() -> None:
    assert render(STATUS) == SCREEN
