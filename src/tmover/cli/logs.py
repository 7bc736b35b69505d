"""Logging of the command: lines for people on a terminal, one JSON object per line otherwise."""

from __future__ import annotations

import json
import logging
import time
from typing import TextIO

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

_EXTRA = ("job_id", "epoch", "node", "rank")
"""Ids that a record may carry."""


class JsonFormatter(logging.Formatter):
    """Writes a record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "text": record.getMessage(),
        }
        line.update({key: getattr(record, key) for key in _EXTRA if hasattr(record, key)})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up(level: str, stream: TextIO) -> None:
    """Send the log to `stream`. Called once, by the command line."""
    if stream.isatty():
        handler: logging.Handler = logging.StreamHandler(stream)
        handler.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")
        )
    else:
        handler = logging.StreamHandler(stream)
        handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
