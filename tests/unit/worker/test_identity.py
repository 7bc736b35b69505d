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


def test_the_keeper_is_on_another_node_and_everyone_keeps_for_exactly_one() -> None:
    everyone = [identity(slot=slot, local_rank=local) for slot in range(3) for local in range(2)]

    keepers = [one.keeper() for one in everyone]

    assert sorted(keepers, key=str) == [0, 1, 2, 3, 4, 5]
    assert all(
        k is not None and k // 2 != one.slot for k, one in zip(keepers, everyone, strict=True)
    )
    assert all(
        everyone[k].ward() == one.rank
        for k, one in zip(keepers, everyone, strict=True)
        if k is not None
    )


def test_a_single_node_has_nobody_to_keep_its_records() -> None:
    assert identity(nnodes=1, slot=0).keeper() is None
    assert identity(nnodes=1, slot=0).ward() is None


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
