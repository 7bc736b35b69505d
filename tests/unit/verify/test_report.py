"""What people read."""

from __future__ import annotations

import json

import pytest

from tmover.verify.report import Found, Report, causes, sentences

FAULT = "kill:rank=1,step=3,point=in_vote"
WEIGHT = Found(step=4, ranks=(0, 1), names={"model.weight": (0, 1)}, joined=(1,))


def report(**changes: object) -> Report:
    usual: dict[str, object] = {
        "verified": False, "equal": False, "steps": 9, "world_size": 2, "seed": 1,
        "faults": (FAULT,),
    }  # fmt: skip
    return Report(**{**usual, **changes})  # type: ignore[arg-type]


def test_an_equal_run_says_what_was_compared() -> None:
    (first, *_) = sentences(report(verified=True, equal=True))

    assert first.startswith("equal: 9 steps of 2 ranks, 1 fault;")


def test_a_parting_is_named_by_step_ranks_tensor_and_joiner() -> None:
    why = causes(WEIGHT, deterministic=True)
    text = "\n".join(sentences(report(parting=WEIGHT, deterministic=True, causes=why)))

    assert "NOT EQUAL: the runs part at step 4, on ranks 0, 1" in text
    assert "  model.weight: ranks 0, 1" in text
    assert "a standby had taken over rank 1" in text
    assert "the script is deterministic" in text
    assert "- state that is not tracked" in text


def test_many_names_are_counted() -> None:
    names: dict[str, tuple[int, ...]] = {f"model.{n}": (0,) for n in range(9)}
    found = Found(step=4, ranks=(0,), names=names, joined=())

    assert "  and 5 more" in sentences(report(parting=found, deterministic=True))


def test_a_script_that_does_not_repeat_itself_is_told_so() -> None:
    text = "\n".join(sentences(report(parting=WEIGHT, deterministic=False)))

    assert "the script is not deterministic" in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"failure": "exit code 1"}, "did not end well: exit code 1"),
        ({"equal": True, "missed": (FAULT,)}, f"{FAULT} did not happen"),
        ({"lost": 2}, "2 samples lost, 0 repeated"),
        ({"equal": True, "verified": True, "unseeded": ("random stream: python",)}, "not seeded"),
    ],
)
def test_whatever_else_keeps_it_from_being_proved_is_said(
    changes: dict[str, object], said: str
) -> None:
    assert said in "\n".join(sentences(report(**changes)))


@pytest.mark.parametrize(
    ("name", "deterministic", "cause"),
    [
        ("samples", False, "a sampler, or a generator given to the loader, that is not seeded"),
        ("batch", False, "samples made with random numbers"),
        ("random stream: python", False, "a seed taken from the time"),
        ("model.weight", False, "a kernel that is not deterministic"),
        ("samples", True, "a loader or sampler with a position of its own"),
        ("batch", True, "data that keeps something from sample to sample"),
        ("batchnorm.weight", True, "state that is not tracked"),
        ("random stream: torch", True, "random numbers drawn between"),
        ("optimizer: lr", True, "state that is not tracked"),
    ],
)
def test_the_likeliest_cause_comes_first(name: str, deterministic: bool, cause: str) -> None:
    found = Found(step=4, ranks=(0,), names={name: (0,)}, joined=())

    assert causes(found, deterministic=deterministic)[0].startswith(cause)


def test_a_stream_that_nobody_seeds_is_the_likeliest_of_all() -> None:
    first = causes(WEIGHT, deterministic=False, unseeded=["random stream: numpy"])[0]

    assert first == "the random stream: numpy is not seeded"


@pytest.mark.parametrize("point", ["before_backward", "in_backward"])
def test_a_point_that_never_comes_with_fsdp_is_told_so(point: str) -> None:
    fault = f"kill:rank=1,step=3,point={point}"
    (*_, line) = sentences(report(equal=True, missed=(fault,)))

    assert "FSDP2 and HSDP compute gradients for parameters of their own" in line
    assert "give point=before_vote" in line


def test_any_other_point_that_never_came_has_nothing_to_do_with_fsdp() -> None:
    assert "FSDP2" not in "\n".join(sentences(report(equal=True, missed=(FAULT,))))


def test_json_has_all_of_it() -> None:
    found = json.loads(report(parting=WEIGHT).to_json())

    assert found["parting"]["names"] == {"model.weight": [0, 1]}
    assert (found["deterministic"], found["seed"], found["faults"]) == (None, 1, [FAULT])
