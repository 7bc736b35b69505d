from typing import Any

from tmover.cli.watch import JobWatch, MoveWatch, News, Notes, summary
from tmover.wire import JobStatus, MoveStatus, SlotStatus, StandbyStatus


def status(*nodes: str, **fields: Any) -> JobStatus:
    slots = tuple(
        SlotStatus(slot=slot, node=node, agent=f"{node}-a", state="training", step=7, heard_s=0.1)
        for slot, node in enumerate(nodes or ("node1", "node2"))
    )
    values: dict[str, Any] = {
        "job": "3",
        "owner": "me",
        "phase": "training",
        "epoch": 1,
        "step": 7,
        "world_size": 2,
        "slots": slots,
        "standbys": (StandbyStatus(node="node3", agent="node3-a", state="warm"),),
        "move": None,
        "notes": (),
        "outcome": "",
    }
    return JobStatus(**{**values, **fields})


def moving(phase: str, epoch: int = 2, **fields: Any) -> JobStatus:
    move = MoveStatus(phase=phase, leaver="node2", joiner="node3", epoch=epoch)
    return status(phase=phase, move=move, **fields)


def phases(watch: MoveWatch, *statuses: JobStatus) -> list[str]:
    return [news.phase for one in statuses for news in watch.look(one)]


def test_a_note_is_new_once() -> None:
    notes = Notes(("a",))

    assert notes.new(status(notes=("a", "b"))) == ("b",)
    assert notes.new(status(notes=("a", "b"))) == ()


def test_notes_are_new_though_old_ones_were_dropped() -> None:
    notes = Notes(("a", "b", "c"))

    assert notes.new(status(notes=("b", "c", "d"))) == ("d",)
    assert notes.new(status(notes=("x", "y"))) == ("x", "y")


def test_a_move_is_followed_until_the_node_carries_no_rank() -> None:
    watch = MoveWatch("node2", status())

    seen = phases(
        watch, status(), moving("preparing"), moving("preparing"), moving("armed"),
        moving("switching"), status("node1", "node3"),
    )  # fmt: skip

    assert seen == ["preparing", "armed", "switching", "done"]
    assert watch.is_over
    assert watch.is_done


def test_a_move_that_was_too_quick_to_be_seen_is_done() -> None:
    watch = MoveWatch("node2", status())

    assert phases(watch, status("node1", "node3")) == ["done"]
    assert watch.is_done


def test_a_move_that_is_called_off_is_aborted_with_the_reason() -> None:
    watch = MoveWatch("node2", status())
    list(watch.look(moving("preparing")))

    (note, end) = watch.look(status(notes=("12:00 a joiner was lost",)))

    assert note == News("note", "12:00 a joiner was lost")
    assert end == News("aborted", "node2 stays where it is (12:00 a joiner was lost)")
    assert watch.is_over
    assert not watch.is_done


def test_a_move_that_is_tried_again_goes_on() -> None:
    watch = MoveWatch("node2", status())

    seen = phases(watch, moving("preparing"), moving("preparing", epoch=3))

    assert seen == ["preparing", "preparing"]
    assert not watch.is_over


def test_a_failure_in_the_middle_is_not_the_end_of_the_move() -> None:
    watch = MoveWatch("node2", status())
    list(watch.look(moving("armed")))

    assert phases(watch, status(phase="revoked"), status(phase="switching")) == []
    assert not watch.is_over


def test_a_request_that_was_dropped_is_aborted_though_no_move_was_seen() -> None:
    watch = MoveWatch("node2", status())

    seen = phases(watch, status(notes=("12:00 3 moves of node2 failed: it stays; ask again",)))

    assert seen == ["note", "aborted"]


def test_a_move_that_is_only_asked_for_says_what_it_waits_for() -> None:
    move = MoveStatus(phase="requested", leaver="node2", joiner="", epoch=0)
    still = ", whether this command still runs or not"
    then = f"; the move begins when one is warm{still}"
    forming = f"the job is forming; the move begins when it trains and a standby is warm{still}"
    rehearsing = (StandbyStatus(node="node3", agent="node3-a", state="building"),)

    def waits(**fields: Any) -> list[News]:
        return [*MoveWatch("node2", status()).look(status(move=move, **fields))]

    assert waits(phase="forming") == [News("waiting", forming)]
    assert waits(standbys=()) == [News("waiting", f"there is no standby{then}")]
    assert waits(standbys=rehearsing) == [News("waiting", f"standby node3 building{then}")]


def test_without_a_standby_it_says_that_it_waits() -> None:
    watch = MoveWatch("node2", status(standbys=()))

    seen = phases(watch, status(standbys=()), status(standbys=()), moving("preparing"))

    assert seen == ["waiting", "preparing"]


def test_the_end_of_the_job_is_the_end_of_the_move() -> None:
    watch = MoveWatch("node2", status())

    assert phases(watch, status(phase="ended", code=0, outcome="done")) == ["aborted"]
    assert watch.is_over


def test_a_job_is_followed_by_its_phases_and_notes() -> None:
    watch = JobWatch()

    news = [
        *watch.look(status(phase="forming")),
        *watch.look(status(phase="forming")),
        *watch.look(status(notes=("12:00 hello",))),
    ]

    assert [one.phase for one in news] == ["forming", "note", "training"]
    assert news[1].text == "12:00 hello"


def test_a_summary_says_where_the_job_is() -> None:
    assert summary(status()) == (
        "job 3 training, step 7, epoch 1, nodes node[1-2], standby node3 warm"
    )
    assert "no step yet" in summary(status(step=None))
    assert "no step yet" in summary(status(step=-1))
    assert summary(status(standbys=())).endswith("standby none")


def test_a_note_is_shown_as_it_is_and_a_phase_by_its_name() -> None:
    assert str(News("note", "12:00 hello")) == "12:00 hello"
    assert str(News("armed", "node2 to node3")) == "armed: node2 to node3"
