import getpass
import os
import pathlib
import re
from typing import Any

import msgspec
import pytest

from tmover import config
from tmover.config import Config
from tmover.environment import AgentEnvironment, WorkerEnvironment, own_job
from tmover.errors import ConfigError

SHIPPED = pathlib.Path(__file__).parents[2] / "conf" / "tmover.toml"
TABLES = [field.type for field in msgspec.structs.fields(Config)]


def test_the_shipped_file_shows_every_key_with_its_default() -> None:
    shown: dict[str, Any] = msgspec.toml.decode(SHIPPED.read_bytes())

    assert shown == msgspec.json.decode(msgspec.json.encode(Config()))
    assert config.load(SHIPPED, {}) == Config()


@pytest.mark.parametrize("table", TABLES)
def test_every_key_is_explained(table: type) -> None:
    source = pathlib.Path(config.__file__).read_text()
    body = source[source.index(f"class {table.__name__}(") :].split("\n\n\n")[0]

    for field in msgspec.structs.fields(table):
        assert re.search(rf'\n    {field.name}: [^=\n]+ = .+\n    """\S', body), field.name


def test_every_wait_has_its_deadline() -> None:
    from tmover.core.events import Wait

    keys = {field.name for field in msgspec.structs.fields(config.DeadlineConfig)}

    assert keys == {f"{wait.value}_s" for wait in Wait}


def test_the_links_have_a_key_for_each_of_their_timeouts() -> None:
    from tmover.comm.timeouts import Timeouts

    assert Timeouts(**msgspec.structs.asdict(Config().links)) == Timeouts()


def test_a_file_changes_what_it_names(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "tmover.toml"
    file.write_text("[agent]\nheartbeat_s = 0.25\n")

    loaded = config.load(file, {})

    assert loaded.agent.heartbeat_s == 0.25
    assert loaded.agent.stop_s == Config().agent.stop_s


def test_the_environment_goes_before_the_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "tmover.toml"
    file.write_text("[agent]\nheartbeat_s = 0.25\nstop_s = 3.0\n")
    environ = {"TMOVER_CONFIG": str(file), "TMOVER_AGENT_HEARTBEAT_S": "0.125"}

    loaded = config.load(environ=environ)

    assert (loaded.agent.heartbeat_s, loaded.agent.stop_s) == (0.125, 3.0)


def test_the_variables_of_a_worker_are_no_keys() -> None:
    assert config.load(environ={"TMOVER_AGENT": "ipc://@x", "TMOVER_AGENT_PID": "1"}) == Config()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[agent]\nheartbat_s = 1.0", "heartbat_s"),
        ("[agnet]\nheartbeat_s = 1.0", "agnet"),
        ('[agent]\nheartbeat_s = "fast"', "agent.heartbeat_s"),
        ("[agent]\nstop_s = 0.0", "agent.stop_s = 0.0: must be more than 0"),
        ("[agent]\nstop_s = -1.0", "agent.stop_s"),
        ("[agent]\nstop_s = nan", "agent.stop_s"),
        ("[agent]\nstop_s = inf", "agent.stop_s"),
        (
            "[controller]\nlease_s = 1.5",
            r"agent.heartbeat_s \* 3 < controller.lease_s does not hold",
        ),
        ("[deadlines]\naccuse_s = 300.0", "deadlines.accuse_s < deadlines.report_s"),
        ("[links]\nhandshake_s = 60.0", "links.handshake_s < deadlines.prepare_s"),
        ("[deadlines]\nswitch_s = 9.0", "links.handshake_s < deadlines.switch_s"),
        ("[deadlines]\nswitch_s = 121.0", "deadlines.switch_s <= links.barrier_s"),
        ("[links]\nprobes = 0", "1 <= links.probes <= 127"),
        ("[links]\nprobes = 128", "1 <= links.probes <= 127"),
        ("[links]\nidle_s = 32768", "links.idle_s <= 32767 does not hold: links.idle_s is 32768"),
        ("[links]\ninterval_s = 32768", "links.interval_s <= 32767"),
        ("[links]\nunacked_s = 1e7", r"links.unacked_s = 10000000.0: .* at most 1728000 \(20 days"),
        ("[controller]\nrequest_s = 1e7", "controller.request_s"),
        ("[worker]\nrehearse_steps = 1", "worker.rehearse_steps >= 2"),
        ("[worker]\ncopy_every = 0", "worker.copy_every >= 1"),
        ("[worker]\ncopies = 0", "worker.copies >= 1 does not hold: worker.copies is 0"),
        ("[local]\nnodes = 0", "0 < local.nodes <= 250"),
        ("[local]\nnodes = 251", "0 < local.nodes <= 250"),
        ("[agent", "tmover.toml"),
    ],
)
def test_a_mistake_is_named_with_its_file(
    tmp_path: pathlib.Path, text: str, complaint: str
) -> None:
    file = tmp_path / "tmover.toml"
    file.write_text(text)

    with pytest.raises(ConfigError, match=complaint) as caught:
        config.load(file, {})

    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["node\x1b[2J", "two words", "\udcff"])
def test_a_node_s_name_can_be_shown(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^TMOVER_NODE='[^\x1b\udcff]*' is no name"):
        AgentEnvironment.read({"TMOVER_JOB": "1", "TMOVER_NODE": name})


@pytest.mark.parametrize(
    ("variable", "value", "complaint"),
    [
        ("TMOVER_AGENT_HEARTBAT_S", "1", "did you mean TMOVER_AGENT_HEARTBEAT_S"),
        ("TMOVER_AGENT_XYZ", "1", "no key 'xyz'"),
        ("TMOVER_AGENT_HEARTBEAT_S", "often", "TMOVER_AGENT_HEARTBEAT_S='often'"),
        ("TMOVER_LOCAL_NODES", "0", "local.nodes"),
        ("TMOVER_LINKS_IDLE_S", "40000", "links.idle_s"),
        ("TMOVER_AGENT_JOIN_S", "\udcff", r"TMOVER_AGENT_JOIN_S='\\udcff'"),
    ],
)
def test_a_mistake_in_the_environment_is_named(variable: str, value: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        config.load(environ={variable: value})


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"/nowhere/tmover\.toml"):
        config.load(environ={"TMOVER_CONFIG": "/nowhere/tmover.toml"})


@pytest.mark.parametrize(
    ("environ", "directory"),
    [
        ({"TMOVER_STATE": "/a", "XDG_STATE_HOME": "/b"}, "/a"),
        ({"XDG_STATE_HOME": "/b"}, "/b/tmover"),
        ({}, str(pathlib.Path.home() / ".local/state/tmover")),
    ],
)
def test_state_is_kept_where_the_environment_says(environ: dict[str, str], directory: str) -> None:
    assert str(config.state_directory(environ=environ)) == directory


def test_a_flag_for_the_state_directory_goes_first() -> None:
    flag = pathlib.Path("/flag")

    assert config.state_directory(flag, {"TMOVER_STATE": "/a"}) == flag


@pytest.mark.parametrize("slot", [None, 0, 3])
@pytest.mark.parametrize("standby", [True, False])
def test_an_agent_reads_what_the_scheduler_exports(slot: int | None, standby: bool) -> None:
    place = AgentEnvironment(
        state=pathlib.Path("/s"),
        job="7",
        node="node1",
        address="127.0.0.2",
        standby=standby,
        slot=slot,
    )

    assert AgentEnvironment.read(place.export()) == place


@pytest.mark.parametrize(
    ("environ", "complaint"),
    [
        ({}, "neither TMOVER_JOB nor SLURM_JOB_ID is set"),
        ({"TMOVER_JOB": "1", "TMOVER_ROLE": "spare"}, "TMOVER_ROLE='spare'"),
        ({"TMOVER_JOB": "1", "TMOVER_SLOT": "x"}, "TMOVER_SLOT='x'"),
    ],
)
def test_an_agent_started_wrongly_is_told_what_to_do(
    environ: dict[str, str], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        AgentEnvironment.read(environ)


def test_a_worker_outside_of_tmover_has_no_agent() -> None:
    assert WorkerEnvironment.read({}).agent is None


@pytest.mark.parametrize(("text", "takes"), [("0", False), ("1", True), ("", True)])
def test_a_worker_can_be_told_to_take_no_checkpoints(text: str, takes: bool) -> None:
    assert WorkerEnvironment.read({"TMOVER_CHECKPOINTS": text}).checkpoints is takes


def test_a_list_is_written_with_commas_in_the_environment() -> None:
    loaded = config.load(environ={"TMOVER_CONTROLLER_USERS": "ann,bob"})

    assert loaded.controller.users == ("ann", "bob")


def test_the_cluster_s_controller_is_found_by_its_users(tmp_path: pathlib.Path) -> None:
    environ = {"TMOVER_CONTROLLER_STATE": str(tmp_path)}

    found = config.state_directory(environ=environ)

    me = getpass.getuser()
    assert found == (tmp_path if os.geteuid() == 0 else tmp_path / "users" / me)
    assert config.state_directory(tmp_path / "own", environ) == tmp_path / "own"


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        ({}, None),
        ({"TMOVER_JOB": "3"}, "3"),
        ({"TMOVER_JOB": "slurm7", "SLURM_JOB_ID": "8"}, "slurm7"),
        ({"SLURM_JOB_ID": "17"}, "slurm17"),
        ({"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "1"}, "slurm17r1"),
    ],
)
def test_a_process_knows_its_job(environ: dict[str, str], job: str | None) -> None:
    assert own_job(environ) == job


def test_a_configuration_that_is_given_says_where_the_cluster_s_controller_is(
    tmp_path: pathlib.Path,
) -> None:
    named = config.load(environ={"TMOVER_CONTROLLER_STATE": str(tmp_path)})

    found = config.state_directory(None, {}, named)

    assert found == config.state_directory(environ={"TMOVER_CONTROLLER_STATE": str(tmp_path)})


@pytest.mark.parametrize(
    ("environ", "job", "slot"),
    [
        ({"SLURM_JOB_ID": "12", "SLURM_PROCID": "3"}, "slurm12", 3),
        ({"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "2", "SLURM_PROCID": "0"}, "slurm12r2", 0),
        ({"SLURM_JOB_ID": "12", "SLURM_PROCID": "3", "TMOVER_SLOT": "1"}, "slurm12", 1),
        ({"SLURM_JOB_ID": "13", "SLURM_PROCID": "0", "TMOVER_JOB": "slurm12",
          "TMOVER_ROLE": "standby"}, "slurm12", None),
    ],
)  # fmt: skip
def test_an_agent_in_slurm_knows_its_job_and_slot(
    environ: dict[str, str], job: str, slot: int | None
) -> None:
    place = AgentEnvironment.read({"SLURMD_NODENAME": "n1", **environ})

    assert (place.job, place.slot, place.node) == (job, slot, "n1")
