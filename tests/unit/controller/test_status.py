"""A job as a person is shown it."""

import msgspec
import pytest

from support.jobs import Story, expired, reported
from tmover.controller.desk import Ledger
from tmover.controller.presence import Presence
from tmover.controller.status import of


@pytest.mark.parametrize(("node_s", "until"), [(60.0, 69.0), (0.0, None)])
def test_a_wait_ends_at_its_deadline_or_never(node_s: float, until: float | None) -> None:
    story = Story(standbys=0).training()
    story.tell(expired("a1"), reported("a0/0", 5))
    story.tell(msgspec.structs.replace(reported("a2/0", 5), at=9.0))

    shown = of(Ledger(story.job), Presence(1.0), now=0.0, node_s=node_s)

    assert shown.waiting is not None
    assert (shown.waiting.since, shown.waiting.until) == (9.0, until)
    assert "exit code 75" in shown.waiting.then
    assert shown.incidents == story.job.incidents


def test_a_job_that_trains_waits_for_nobody() -> None:
    shown = of(Ledger(Story().training().job), Presence(1.0), now=0.0)

    assert (shown.waiting, shown.incidents) == (None, ())
