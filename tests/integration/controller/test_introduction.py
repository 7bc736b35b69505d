"""A cluster's controller whose users are known by MUNGE: real users, a real munged."""

from __future__ import annotations

import contextlib
import json
import pathlib
import stat
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from support.munged import NEEDS_MUNGED, munged
from support.others import FIRST, NEEDS_ROOT, SECOND, Others, others
from support.scripted import PATIENCE_S, QUICK, Cast, Controller, on_stage, wait_for
from tmover import wire
from tmover.controller import keys
from tmover.controller.client import Channel, Connection, ask
from tmover.controller.introduction import Entrance, find
from tmover.errors import ConfigError

pytestmark = [NEEDS_ROOT, NEEDS_MUNGED, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def crowd() -> Iterator[Others]:
    with others() as made:
        yield made


@pytest.fixture(scope="module")
def socket() -> Iterator[str]:
    with munged() as path:
        yield path


class House(Controller):
    """A cluster's controller. Everything in `users` is what users see of it."""

    def __init__(self, place: pathlib.Path, socket: str, **more: str) -> None:
        environ = {
            **QUICK, "TMOVER_CONTROLLER_IDENTITY": "munge",
            "TMOVER_CONTROLLER_MUNGE_SOCKET": socket, **more,
        }  # fmt: skip
        super().__init__(place / "cluster", environ)

    def place(self, user: str) -> pathlib.Path:
        return self.state / "users" / user

    @property
    def introductions(self) -> int:
        return self.log.read_text().count("was introduced")

    def submit(self, owner: str) -> str:
        made = ask(self.state, wire.SubmitRequest(nnodes=1, nproc=1, owner=owner), PATIENCE_S)
        assert isinstance(made, wire.Accepted)
        return made.job


@contextlib.contextmanager
def house(crowd: Others, socket: str, name: str, **more: str) -> Iterator[House]:
    place = crowd.place / name
    place.mkdir(mode=0o711)
    place.chmod(0o711)
    made = House(place, socket, **more)
    made.start()
    try:
        yield made
    finally:
        if made.process is not None:
            made.stop()


@pytest.fixture(scope="module")
def one(crowd: Others, socket: str) -> Iterator[House]:
    """A controller for the tests that leave it alone."""
    with house(crowd, socket, "one") as made:
        yield made


def seen(crowd: Others, house: House, user: str) -> list[str]:
    """Return the jobs that a user sees."""
    ended = crowd.run(user, "tmover", "status", "--json", "--state", house.place(user))
    assert ended.returncode == 0, ended.stderr
    return [job["job"] for job in json.loads(ended.stdout)]


def test_users_who_were_never_named_are_told_apart(crowd: Others, one: House) -> None:
    first, second = one.submit(FIRST), one.submit(SECOND)

    assert seen(crowd, one, FIRST)[-1] == first
    assert seen(crowd, one, SECOND) == [second]
    mine = crowd.run(FIRST, "tmover", "cancel", first, "--state", one.place(FIRST))
    theirs = crowd.run(FIRST, "tmover", "cancel", second, "--state", one.place(FIRST))
    assert mine.returncode == 0, mine.stderr
    assert (theirs.returncode, theirs.stderr) == (1, f"error: there is no job {second} here\n")


def test_what_says_where_the_door_is_has_no_secret_in_it(one: House) -> None:
    one.submit(FIRST)
    path = one.state / "users" / "door.json"
    said = msgspec.json.decode(path.read_bytes(), type=Entrance)
    server, client = (
        (one.state / "keys" / name).read_text().split()[1] for name in ("server.key", "client.key")
    )

    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert (path.stat().st_uid, stat.S_IMODE(path.parent.stat().st_mode)) == (0, 0o711)
    assert not {server, client} & set(msgspec.structs.astuple(said))
    for kept in ("keys", "journal", "secrets"):
        assert stat.S_IMODE((one.state / kept).stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_door_that_others_could_have_made_is_not_gone_to(
    tmp_path: pathlib.Path, one: House, mode: int
) -> None:
    forged = tmp_path / "users" / "door.json"
    forged.parent.mkdir()
    forged.write_bytes((one.state / "users" / "door.json").read_bytes())
    forged.chmod(mode)

    with pytest.raises(ConfigError, match="it is not to be trusted"):
        find(forged.parent / "root")


def test_who_is_not_among_the_users_is_told_so(crowd: Others, socket: str) -> None:
    with house(crowd, socket, "few", TMOVER_CONTROLLER_USERS=FIRST) as few:
        job = few.submit(FIRST)
        assert seen(crowd, few, FIRST) == [job]
        told = crowd.run(SECOND, "tmover", "status", "--state", few.place(SECOND))

    assert (told.returncode, told.stdout) == (2, "")
    assert f"its administrator has to put {SECOND} among its `users`" in told.stderr


def test_without_munged_the_controller_does_not_start(crowd: Others) -> None:
    ended = House(crowd.place, "/nowhere/munged").run_to_end()

    assert ended.returncode == 2
    assert "MUNGE does not say who users are (identity in [controller]): " in ended.stderr
    assert "/nowhere/munged" in ended.stderr


def test_who_has_no_munged_is_told_so(crowd: Others) -> None:
    with contextlib.ExitStack() as stack:
        with munged() as ended:
            made = stack.enter_context(house(crowd, ended, "lost"))
        told = crowd.run(
            FIRST, "tmover", "status", "--state", made.place(FIRST),
            env={"TMOVER_CONTROLLER_REQUEST_S": "1"},
        )  # fmt: skip
        assert ask(made.state, wire.StatusRequest(), PATIENCE_S)

    assert (told.returncode, told.stdout, len(told.stderr.splitlines())) == (4, "", 1)
    assert f'does not know us: failed to access "{ended}"' in told.stderr


# --- agents ---------------------------------------------------------------------------------------


@pytest.fixture
def cast(crowd: Others, socket: str, request: pytest.FixtureRequest) -> Iterator[Cast]:
    """Agents of root's, which introduce themselves as anybody does."""
    with house(crowd, socket, f"cast-{request.node.name}"[:60]) as made, on_stage(made) as cast:
        cast.state = made.place("root")
        yield cast


def test_a_controller_that_is_started_again_knows_its_agents_at_once(cast: Cast) -> None:
    assert isinstance(cast.controller, House)
    job, agents = cast.form(2, standbys=1)
    channels = [agent.channel for agent in agents]
    boot = agents[0].boot

    cast.restart()
    cast.until(lambda: all(agent.boot != boot for agent in agents), "all to be greeted again")

    text = cast.controller.log.read_text()
    again = text[text.rindex("listening on") :]
    assert "refused a connection" not in again
    assert [agent.channel for agent in agents] == channels
    assert cast.status(job).phase == "training"


def test_whoever_was_forgotten_introduces_itself_again(cast: Cast) -> None:
    assert isinstance(cast.controller, House)
    job, agents = cast.form(2, standbys=1)
    boot = agents[0].boot
    before = cast.controller.introductions

    cast.restart((cast.controller.state / "keys" / "introduced.jsonl").unlink)
    cast.until(lambda: all(agent.boot != boot for agent in agents), "all to be greeted again")

    assert cast.controller.introductions >= before + len(agents)
    assert cast.status(job).phase == "training"


def test_a_door_that_has_moved_is_found(cast: Cast) -> None:
    """The key is forgotten, and the first word of the new door comes after the agents knock."""
    assert isinstance(cast.controller, House)
    _, agents = cast.form(1)
    boot = agents[0].boot
    door = cast.controller.state / "users" / "door.json"
    cast.controller.kill()
    said = door.read_bytes()
    door.write_bytes(said.replace(b'"door":"tcp://127.0.0.1:', b'"door":"tcp://127.9.9.9:'))
    (cast.controller.state / "keys" / "introduced.jsonl").unlink()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    late = Channel(cast.state, context)
    try:
        assert late.look() is not Connection.OPEN
        cast.controller.start()

        def is_open() -> bool:
            late.follow()
            cast.turn()
            return late.look() is Connection.OPEN and agents[0].boot != boot

        wait_for(is_open, "both to come in", late.explain)
    finally:
        late.close()
        context.destroy(linger=0)


def test_with_new_keys_everybody_introduces_itself_again(cast: Cast) -> None:
    assert isinstance(cast.controller, House)
    job, agents = cast.form(2)
    boot = agents[0].boot
    door = cast.controller.state / "users" / "door.json"
    before = msgspec.json.decode(door.read_bytes(), type=Entrance).server

    keys.ask_to_rotate(cast.controller.state)
    cast.restart()
    cast.until(lambda: all(agent.boot != boot for agent in agents), "all to be greeted again")

    assert msgspec.json.decode(door.read_bytes(), type=Entrance).server != before
    assert cast.status(job).phase == "training"


def test_a_second_user_is_no_agent_of_the_first_one_s_job(crowd: Others, one: House) -> None:
    job = one.submit(FIRST)
    (crowd.place / "x.py").write_text("")

    joins = crowd.run(
        SECOND, "tmover", "run", "--nproc-per-node", 1, crowd.place / "x.py",
        env={
            "TMOVER_STATE": str(one.place(SECOND)), "TMOVER_JOB": job, "TMOVER_NODE": "n",
            "TMOVER_ROLE": "standby", "TMOVER_ADDRESS": "127.0.0.9", "TMOVER_AGENT_JOIN_S": "3",
        },
        timeout_s=120,
    )  # fmt: skip

    assert joins.returncode != 0
    assert f"there is no job {job} here" in joins.stderr, joins
    seen = ask(one.state, wire.StatusRequest(job=job), PATIENCE_S)
    assert isinstance(seen, wire.StatusReply)
    assert (seen.jobs[0].standbys, seen.jobs[0].nodes) == ((), ())
