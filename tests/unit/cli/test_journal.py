"""What `tmover journal`, `status` and `wait` say of journals, without a controller or beside it."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
from click.testing import CliRunner

from support.world import World
from tmover.cli.main import tmover
from tmover.cli.telling import _SENTENCES, told
from tmover.controller import keys
from tmover.controller.archive import Archive
from tmover.controller.desk import Desk, Ledgers
from tmover.controller.journal import Entry, Journal
from tmover.core.events import AnyEvent, CancelRequested, NodeLost, Submitted
from tmover.core.orders import EndNode, OrderNode
from tmover.errors import JournalError

SUBMITTED = Submitted(job="3", at=1.7e9, nnodes=2, nproc=1, owner="ann")
CANCELLED = CancelRequested(job="3", at=1.7e9 + 5, reason="enough", code=9)


@pytest.fixture
def state(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "state"


@pytest.fixture
def journal(state: pathlib.Path) -> Iterator[Journal]:
    state.mkdir(mode=0o700)
    journal = Journal(state / "journal", lines=5, size=1)
    yield journal
    journal.close()


def run(state: pathlib.Path, *arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(tmover, [*arguments, "--state", str(state)])
    return done.exit_code, done.output


def a_run() -> list[AnyEvent]:
    """Return what happened to a simulated job that lost a node."""
    world = World(tape=bytes(300), standbys=1).run()
    return [msgspec.structs.replace(each, job="3", at=1.7e9 + each.at) for each in world.journal]


def feed(journal: Journal, *entries: Entry) -> Desk:
    desk = Desk(journal)
    for entry in entries:
        desk.write([entry])
        desk.take_in(entry)
    return desk


def test_every_event_has_a_sentence_that_its_fields_fill() -> None:
    kinds = {kind.__name__: kind for kind in AnyEvent.__args__}  # type: ignore[attr-defined]
    assert {*_SENTENCES, "Sharing"} == kinds.keys()

    for event in a_run():
        kind, text = told(event)
        assert kind == type(event).__name__
        assert "{" not in text
    assert told(CANCELLED) == ("CancelRequested", "the job is to end with 9: enough")


def test_show_prints_what_happened(state: pathlib.Path, journal: Journal) -> None:
    feed(journal, SUBMITTED, CANCELLED)

    code, output = run(state, "journal", "show", "3")

    assert code == 0
    first, second = output.splitlines()
    assert first.split()[0] == "1"
    assert first.endswith("ann submits a job of 2 nodes x 1 ranks, 0 standbys")
    assert second.endswith("CancelRequested   the job is to end with 9: enough")


def test_what_would_move_the_cursor_is_written_out(state: pathlib.Path, journal: Journal) -> None:
    feed(journal, SUBMITTED, msgspec.structs.replace(CANCELLED, reason="\x1b[2J{owner}%s\n"))

    _, output = run(state, "journal", "show", "3")

    assert "\\x1b[2J{owner}%s\\n" in output


def test_show_goes_on_over_a_snapshot_and_as_json(state: pathlib.Path, journal: Journal) -> None:
    desk = feed(journal, *a_run())
    desk.tidy()
    before = len(a_run())

    code, output = run(state, "journal", "show", "3", "--json")

    lines = [msgspec.json.decode(line) for line in output.splitlines()]
    assert code == 0
    assert [line["n"] for line in lines] == list(range(1, before + 2))
    assert lines[-1]["entry"]["type"] == "Snapshot"
    assert "all before it: Ended, epoch" in run(state, "journal", "show", "3")[1]


def test_a_reader_that_goes_away_ends_it_quietly(state: pathlib.Path, journal: Journal) -> None:
    for number in range(300):
        noise = NodeLost(job="3", at=1.0, node=f"n{number}" * 100, reason="x" * 1000)
        journal.append("3", [noise])
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, "-m", "tmover", "journal", "show", "3", "--state", str(state)]
    with subprocess.Popen(argv, env=environ, stdout=-1, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(30) == 1


def test_verify_names_the_damage_and_the_way_out_and_ends_with_1(
    state: pathlib.Path, journal: Journal
) -> None:
    feed(journal, SUBMITTED, CANCELLED)
    feed(journal, msgspec.structs.replace(SUBMITTED, job="4"))
    assert run(state, "journal", "verify") == (
        0, "job 3: 2 lines, all whole\njob 4: 1 lines, all whole\n",
    )  # fmt: skip
    path = state / "journal" / "3.jsonl"
    good = path.read_bytes()
    path.write_bytes(good.replace(b"enough", b"enaugh"))

    code, output = run(state, "journal", "verify")
    one = run(state, "journal", "verify", "4")
    _, text = run(state, "journal", "verify", "--json")
    as_json = [msgspec.json.decode(line) for line in text.splitlines()]

    assert code == 1
    assert output.startswith(f"job 3: {path}, line 2 is damaged: its sum does not fit")
    assert f"mv {path} {path}.damaged" in output
    assert one == (0, "job 4: 1 lines, all whole\n")
    assert [(x["job"], bool(x["damage"])) for x in as_json] == [("3", True), ("4", False)]


def test_a_torn_line_is_only_named_and_nothing_is_changed(
    state: pathlib.Path, journal: Journal
) -> None:
    feed(journal, SUBMITTED, CANCELLED)
    path = state / "journal" / "3.jsonl"
    path.write_bytes(path.read_bytes()[:-7])
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in path.parent.iterdir()}

    code, output = run(state, "journal", "verify")
    for command in (["show", "3"], ["replay", "3"]):
        assert run(state, "journal", *command)[0] == 0

    assert (code, output) == (0, "job 3: 1 lines, all whole, and a last one without its end\n")
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in path.parent.iterdir()} == before


def test_damage_in_the_older_generation_is_named_as_what_it_is(
    state: pathlib.Path, journal: Journal
) -> None:
    feed(journal, *a_run()).tidy()
    older = state / "journal" / "3.jsonl.1"
    older.write_bytes(older.read_bytes().replace(b"Joined", b"Jained", 1))

    code, output = run(state, "journal", "verify")

    assert code == 1
    assert f"No controller reads it: rm {older}" in output
    assert run(state, "journal", "replay", "3")[0] == 0


def test_replay_shows_what_the_job_was_after_each_line(
    state: pathlib.Path, journal: Journal
) -> None:
    events = a_run()
    desk = feed(journal, *events)
    desk.tidy()
    archive = Archive(state)

    for until in range(1, len(events) + 1):
        ledger, number = archive.ledger("3", until)
        again = Ledgers()
        for event in events[:until]:
            again.take_in(event)
        assert number == until
        assert ledger is not None
        assert ledger.job == again.ledgers["3"].job

    code, output = run(state, "journal", "replay", "3", "--until", "4")
    assert code == 0
    assert output.startswith("after line 4\nJOB 3  forming")
    assert run(state, "journal", "replay", "3")[1].startswith(f"after line {len(events) + 1}\n")


def test_replay_shows_what_the_scheduler_owes(state: pathlib.Path, journal: Journal) -> None:
    desk = feed(journal, SUBMITTED)
    desk.ledgers["3"].effects += [
        EndNode(job="3", node="n7", reason="lost"), OrderNode(job="3", exclude=("n7",)),
    ]  # fmt: skip
    journal.replace("3", desk.ledgers["3"].snapshot())

    code, output = run(state, "journal", "replay", "3")
    as_json = msgspec.json.decode(run(state, "journal", "replay", "3", "--json")[1])

    assert code == 0
    assert output.endswith("the scheduler owes it:\n  EndNode node=n7 reason=lost\n"
                           "  OrderNode exclude=n7 total=0\n")  # fmt: skip
    assert [effect["type"] for effect in as_json["owed"]] == ["EndNode", "OrderNode"]
    assert as_json["status"]["phase"] == "forming"


def test_a_job_of_slurm_is_found_by_its_id(state: pathlib.Path, journal: Journal) -> None:
    for job in ("slurm7", "slurm7r1", "slurm71"):
        feed(journal, msgspec.structs.replace(SUBMITTED, job=job))

    assert Archive(state).choose("7") == "slurm7r1"
    assert run(state, "journal", "show", "8") == (
        2, f"error: there is no journal of job 8 in {state / 'journal'}; "
        "the last ones: slurm7, slurm7r1, slurm71\n",
    )  # fmt: skip


def test_without_a_journal_there_is_nothing_to_read(tmp_path: pathlib.Path) -> None:
    code, output = run(tmp_path, "journal", "verify")

    assert code == 2
    assert output == f"error: there is no journal in {tmp_path}, or none that you may read\n"


# --- without a controller -------------------------------------------------------------------------


def test_status_without_a_controller_is_what_the_journal_says_and_says_so(
    state: pathlib.Path, journal: Journal
) -> None:
    feed(journal, *a_run()[:-1])
    journal.close()

    code, output = run(state, "status")

    assert code == 4
    said, *shown = output.splitlines()
    assert said.startswith(f"no controller runs on {state}: start one with `tmover controller ")
    assert said.endswith(" s old")
    assert shown[0].startswith("JOB 3  training")
    assert shown[1].startswith("as of ")
    assert shown[1].endswith(", by the journal")


def test_a_program_can_tell_that_a_status_is_old(state: pathlib.Path, journal: Journal) -> None:
    feed(journal, SUBMITTED)
    journal.close()

    done = CliRunner().invoke(tmover, ["status", "3", "--json", "--state", str(state)])

    assert done.exit_code == 4
    [status] = msgspec.json.decode(done.stdout)
    assert status["as_of"] == pytest.approx((state / "journal" / "claim.last").stat().st_mtime)


def test_a_damaged_journal_does_not_hide_the_others(state: pathlib.Path, journal: Journal) -> None:
    feed(journal, SUBMITTED)
    feed(journal, msgspec.structs.replace(SUBMITTED, job="4"))
    journal.close()
    path = state / "journal" / "3.jsonl"
    path.write_bytes(b"{}\n" + path.read_bytes())

    code, output = run(state, "status")

    assert code == 4
    assert f"{path}, line 1 is damaged" in output
    assert "JOB 4  forming" in output
    with pytest.raises(JournalError):
        Archive(state).ledger("3")


def test_wait_ends_as_a_job_that_ended_before_its_controller(
    state: pathlib.Path, journal: Journal
) -> None:
    feed(journal, SUBMITTED, CANCELLED)
    journal.close()

    assert run(state, "wait", "3") == (9, "")
    assert run(state, "wait") == (9, "")
    assert run(state, "wait", "4", "--patience", "0")[0] == 4


def test_a_job_that_has_not_ended_is_still_waited_for(
    state: pathlib.Path, journal: Journal
) -> None:
    feed(journal, SUBMITTED)
    journal.close()

    code, output = run(state, "wait", "3", "--patience", "0")

    assert code == 4
    assert output.startswith("error: no controller runs on")


def test_a_controller_that_was_killed_is_not_waited_for(
    state: pathlib.Path, journal: Journal
) -> None:
    feed(journal, SUBMITTED, CANCELLED)
    journal.close()
    keys.make(state)
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    address = {
        "address": f"tcp://127.0.0.1:{port}", "pid": gone.pid, "boot": "b",
        "host": socket.gethostname(),
    }  # fmt: skip
    (state / "controller.json").write_bytes(msgspec.json.encode(address))
    environ = {"TMOVER_CONTROLLER_REQUEST_S": "3600"}

    done = CliRunner().invoke(tmover, ["status", "--state", str(state)], env=environ)

    assert done.exit_code == 4
    assert f"its process {gone.pid} has ended; start one with `tmover controller" in done.output
    assert "JOB 3  ended, exit code 9" in done.output
