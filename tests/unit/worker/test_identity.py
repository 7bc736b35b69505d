from tmover.worker.identity import Identity


def identity(**changed: object) -> Identity:
    fields: dict[str, object] = {
        "job": "1",
        "agent": "node3-0a0a0a0a",
        "local_rank": 1,
        "slot": 2,
        "nnodes": 3,
        "nproc": 2,
        "sandbox": True,
    }
    return Identity(**{**fields, **changed})  # type: ignore[arg-type]


def test_ranks_follow_the_slot() -> None:
    assert identity().rank == 5
    assert identity().world_size == 6


def test_a_standby_that_takes_a_rank_stays_a_rehearsal_until_it_is_live() -> None:
    moved = identity().at_rank(1)

    assert (moved.slot, moved.rank, moved.sandbox) == (0, 1, True)
    assert not moved.live().sandbox


def test_the_script_is_told_in_torchruns_variables(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    import os

    with monkeypatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
            patch.setenv(name, "")
        identity().export()
        said = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}

    assert said == {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1"}
