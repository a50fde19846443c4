"""Logs as lines of JSON on standard error, one for each request, with its id."""

import json
import logging
import sys
import time
from typing import Any

LOGGER = logging.getLogger("afield.serve")


class JsonLines(logging.Formatter):
    """A record as one line: time, level, message, and the fields that it was given."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(level: str = "info") -> None:
    """Send what the service and uvicorn say to standard error, as lines of JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("afield.serve", "uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler] if name != "uvicorn.error" else [], name == "uvicorn.error"
        logger.setLevel(level.upper())
    logging.getLogger("uvicorn.access").disabled = True  # requests are logged with their ids
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.WARNING)


def say(event: str, **fields: Any) -> None:
    """A line at any level."""
    record = LOGGER.makeRecord(LOGGER.name, logging.INFO, "", 0, event, (), None, extra={"fields": fields})
    LOGGER.handle(record)


def log(event: str, **fields: Any) -> None:
    LOGGER.info(event, extra={"fields": fields})
