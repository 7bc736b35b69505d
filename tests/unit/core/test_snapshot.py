"""A job in a snapshot is the job, and what a snapshot cannot hold or be read from is said."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, Union

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.jobs import Story
from support.world import World, saved_and_restored
from tmover.core.events import AnyEvent, CancelRequested
from tmover.core.job import Job, decide
from tmover.core.phase import Training
from tmover.core.snapshot import form, restore, save
from tmover.errors import JournalError


@pytest.mark.parametrize("point", ["submitted", "training", "armed", "revoked", "recovering"])
def test_a_job_is_restored_as_it_was(point: str) -> None:
    story = Story()
    getattr(story, point)()

    restored = saved_and_restored(story.job)

    assert restored == story.job
    assert type(restored.phase) is type(story.job.phase)


@given(tape=st.binary(min_size=200, max_size=600), cut=st.floats(0, 1))
def test_a_snapshot_and_what_came_after_it_lead_where_all_of_it_leads(
    tape: bytes, cut: float
) -> None:
    world = World(tape=tape).run()
    before = Job(name="j")
    for event in world.journal[: int(cut * len(world.journal))]:
        before, _ = decide(before, event)
    after, again = before, saved_and_restored(before)
    assert again == before

    for event in world.journal[int(cut * len(world.journal)) :]:
        after, actions = decide(after, event)
        again, same = decide(again, event)
        assert same == actions

    assert again == after == world.job


def test_it_can_be_read_by_people() -> None:
    saved = save(Story().training().job)

    assert saved["phase"] == {"is": "Training"}
    assert saved["slots"] == ["a0", "a1", "a2"]
    assert saved["agents"]["a1"]["node"] == "n1"
    assert saved["plan"]["members"][1]["worker"] == "a1/0"


def test_every_field_with_a_default_may_be_missing_in_an_older_one() -> None:
    saved = save(Story().training().job)
    needed = {"name"}

    for name in saved.keys() - needed:
        older = {key: value for key, value in saved.items() if key != name}
        default = getattr(Job(name="j"), name)
        assert getattr(restore(older), name) == default


class Old(NamedTuple):
    step: int


class Newer(NamedTuple):
    step: int
    times: int = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Before:
    of: Mapping[tuple[str, int], Old]


@dataclasses.dataclass(frozen=True, kw_only=True)
class After:
    of: Mapping[tuple[str, int], Newer]
    seen: frozenset[int] = frozenset({1})
    last: Union[Newer, None] = None


def test_fields_that_were_added_later_take_their_defaults() -> None:
    written = msgspec.json.encode(form(Before).write(Before(of={("a", 1): Old(7)})))

    read = form(After).read(msgspec.json.decode(written), "$")

    assert read == After(of={("a", 1): Newer(7, 3)}, seen=frozenset({1}), last=None)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ({"shield": 1}, "at $: this release knows no 'shield'"),
        ({"name": None}, "at $.name: Expected `str`, got `null`"),
        ({"phase": {"is": "Dreaming"}}, "at $.phase: 'Dreaming' is not one of New, Forming"),
        ({"phase": {"is": "Ended", "code": 1}}, "at $.phase: 'reason' is missing"),
        ({"agents": []}, "at $.agents: it is no object"),
        ({"slots": {}}, "at $.slots: it is no list"),
        ({"unreleased": {"x": "a"}}, "at $.unreleased: invalid literal for int"),
        ({"relinked": [[["a"], 1.0]]}, "at $.relinked[0][0]: it is no list of 2"),
        ({"epoch": "1"}, "at $.epoch: Expected `int`, got `str`"),
    ],
)
def test_what_this_release_cannot_read_is_refused_where_it_stands(
    spoil: dict[str, Any], said: str
) -> None:
    saved = save(Story().training().job) | spoil

    with pytest.raises(JournalError) as caught:
        restore(saved)

    assert said in str(caught.value)


def test_what_it_restores_can_be_decided_about() -> None:
    job = saved_and_restored(Story().training().job)
    event: AnyEvent = CancelRequested(job="j", reason="enough")

    assert isinstance(job.phase, Training)
    assert decide(job, event) == decide(Story().training().job, event)
