import io
import json
import logging
from collections.abc import Iterator

import pytest

from tmover.cli import logs


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def root() -> Iterator[None]:
    logger = logging.getLogger()
    level, handlers = logger.level, logger.handlers[:]
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers


def test_off_a_terminal_a_record_is_one_json_object() -> None:
    stream = io.StringIO()
    logs.set_up("INFO", stream)

    logging.getLogger("tmover.x").info("moved %s\nout", "node1", extra={"job_id": "7", "other": 1})

    (line,) = stream.getvalue().splitlines()
    record = json.loads(line)
    assert record.pop("time").endswith("Z")
    assert record == {
        "level": "INFO", "logger": "tmover.x", "text": "moved node1\nout", "job_id": "7",
    }  # fmt: skip


def test_an_error_keeps_its_traceback() -> None:
    stream = io.StringIO()
    logs.set_up("INFO", stream)

    try:
        int("x")
    except ValueError:
        logging.getLogger("tmover").exception("broke")

    assert "ValueError: invalid literal" in json.loads(stream.getvalue())["error"]


def test_on_a_terminal_a_record_is_a_line_for_people() -> None:
    stream = Terminal()
    logs.set_up("WARNING", stream)

    logging.getLogger("tmover").info("unheard")
    logging.getLogger("tmover").warning("lost the workers")

    assert stream.getvalue().endswith("WARNING lost the workers\n")
    assert "unheard" not in stream.getvalue()
