"""Logging of every process: text or JSON lines on stderr, written by a thread of its own, never by the one that logs.

Knows nothing of what is logged.
"""

from __future__ import annotations

import atexit
import json
import logging
import logging.handlers
import queue
import sys

import setproctitle

QUEUED_RECORDS = 10_000  # beyond it records are dropped: a blocked stderr must not stop the server

_listeners: list[logging.handlers.QueueListener] = []


def start_logging(log_format: str, process: str) -> None:
    """`process` names the source in every line, as "engine.1"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else _text_formatter(process))
    records: queue.Queue[logging.LogRecord] = queue.Queue(QUEUED_RECORDS)
    listener = _NamedListener(records, handler)
    listener.start()
    _listeners.append(listener)
    dropping = _DroppingHandler(records)
    dropping.setFormatter(logging.Formatter("%(message)s"))  # it renders tracebacks, the listener the line
    logging.basicConfig(level=logging.INFO, handlers=[dropping], force=True)


@atexit.register
def stop_logging() -> None:
    """Write what is queued. For a process that ends without running its exit handlers."""
    while _listeners:
        _listeners.pop().stop()


class JsonFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": record.created,
            "level": record.levelname.lower(),
            "process": self._process,
            "thread": record.threadName,
            "logger": record.name,
            "message": record.getMessage(),
        }
        return json.dumps(line, ensure_ascii=False)


def _text_formatter(process: str) -> logging.Formatter:
    return logging.Formatter(f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s")


class _DroppingHandler(logging.handlers.QueueHandler):
    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            return

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's own name)
        return


class _NamedListener(logging.handlers.QueueListener):
    def _monitor(self) -> None:
        setproctitle.setthreadtitle("log")
        super()._monitor()  # type: ignore[misc]  # the stub leaves the method out
