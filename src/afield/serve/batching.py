"""Requests that arrive together are answered together: a bounded queue, and a thread for each core that empties it.

A thread takes the oldest request and those behind it that fit beside it: of the same model version, of rows of the same
shapes, up to `max_batch` rows together. If there is room, and other requests are being read from their sockets right
now, it waits for them, `max_wait` seconds at most; a request that is alone does not wait. While all threads are busy,
the next batch gathers by itself.

A batch that fails is answered request by request, so that nobody pays for a neighbour's bad row. What does not fit in
the queue is refused at once (`Busy`).
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from afield.serve.engine import Arrays, Engine

Outcome = Arrays | BaseException


class Busy(RuntimeError):
    """The queue is full."""


@dataclass
class _Waiting:
    engine: Engine
    arrays: Arrays
    rows: int
    done: Callable[[Outcome], None]
    shapes: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.shapes = tuple((name, a.shape[1:]) for name, a in self.arrays.items())


class Batcher:
    """A queue and its threads.

    max_queue   rows that may wait
    expected    how many requests are being read, which may soon be here
    on_batch    is called with the rows of every batch
    """

    def __init__(
        self,
        threads: int,
        *,
        max_batch: int = 64,
        max_wait: float = 0.002,
        max_queue: int = 4096,
        expected: Callable[[], int] = lambda: 0,
        on_batch: Callable[[int], None] = lambda rows: None,
    ) -> None:
        self.max_batch, self.max_wait, self.max_queue = max_batch, max_wait, max_queue
        self.expected, self.on_batch = expected, on_batch
        self.rows = 0  # that wait
        self._queue: deque[_Waiting] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._threads = [threading.Thread(target=self._work, name=f"afield-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    async def run(self, engine: Engine, arrays: Arrays, rows: int) -> Arrays:
        """The answers of an engine to some rows."""
        loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def settle(outcome: Outcome) -> None:
            if future.done():  # nobody waits any more
                return
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        def done(outcome: Outcome) -> None:
            loop.call_soon_threadsafe(settle, outcome)

        self._put(_Waiting(engine, arrays, rows, done))
        return await future

    def close(self) -> None:
        """Answer what is there, then stop."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _put(self, waiting: _Waiting) -> None:
        with self._changed:
            if self._closing or self.rows + waiting.rows > max(self.max_queue, waiting.rows):
                raise Busy(f"{self.rows} rows are waiting, of {self.max_queue} that may: try again.")
            self._queue.append(waiting)
            self.rows += waiting.rows
            self._changed.notify()

    def _work(self) -> None:
        while batch := self._take():
            rows = sum(one.rows for one in batch)
            self.on_batch(rows)
            for one, outcome in zip(batch, _answer(batch), strict=True):
                try:
                    one.done(outcome)
                except RuntimeError:  # its event loop is gone
                    continue

    def _take(self) -> list[_Waiting]:
        """The next batch; empty: there will be none."""
        with self._changed:
            while not self._queue:
                if self._closing:
                    return []
                self._changed.wait()
            batch = [self._queue.popleft()]
            first, rows, deadline = batch[0], batch[0].rows, time.monotonic() + self.max_wait
            while first.engine.joins:
                rows += self._gather(batch, self.max_batch - rows)
                left = deadline - time.monotonic()
                if rows >= self.max_batch or left <= 0 or self._closing or self._queue or not self.expected():
                    break
                self._changed.wait(left)
            self.rows -= sum(one.rows for one in batch)
            return batch

    def _gather(self, batch: list[_Waiting], room: int) -> int:
        """Move requests that fit from the head of the queue to the batch; how many rows they have."""
        first, rows = batch[0], 0
        while self._queue and self._queue[0].engine is first.engine and self._queue[0].shapes == first.shapes:
            if rows + self._queue[0].rows > room:
                break
            batch.append(self._queue.popleft())
            rows += batch[-1].rows
        return rows


def _answer(batch: list[_Waiting]) -> list[Outcome]:
    engine = batch[0].engine
    if len(batch) == 1:
        return [_run(engine, batch[0].arrays)]
    joined = {name: np.concatenate([one.arrays[name] for one in batch]) for name in batch[0].arrays}
    outcome = _run(engine, joined)
    if isinstance(outcome, BaseException):
        return [_run(engine, one.arrays) for one in batch]
    ends = np.cumsum([one.rows for one in batch]).tolist()
    return [{k: a[end - one.rows : end] for k, a in outcome.items()} for one, end in zip(batch, ends, strict=True)]


def _run(engine: Engine, arrays: Arrays) -> Outcome:
    try:
        return engine.run(arrays)
    except Exception as error:  # whatever it is, it belongs to the request
        return error
