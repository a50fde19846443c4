"""Requests that arrive together are answered together: a bounded queue, and a thread for each core that empties it.

A thread takes the oldest request and those behind it that fit beside it: of the same model version, of rows of the same
shapes, up to `max_batch` rows together; what the event loop has read in one turn is queued in one step. If there is
room, and other requests are being read from their sockets right now, it waits for them, `max_wait` seconds at most; a
request that is alone does not wait. While all threads are busy, the next batch gathers by itself.

A batch that fails is answered request by request, so that nobody pays for a neighbour's bad row. What does not fit in
the queue is refused at once (`Busy`).
"""

import asyncio
import contextlib
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from afield.serve.engine import Arrays, Engine

Outcome = Arrays | BaseException


class Busy(RuntimeError):
    """The queue is full."""


@dataclass(slots=True)
class _Waiting:
    engine: Engine
    arrays: Arrays
    rows: int
    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[Arrays]"
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
        self._come = self._gone = 0  # rows: the first is the event loop's, the second that of the threads
        self._queue: deque[_Waiting] = deque()
        self._arriving: list[_Waiting] = []
        self._changed = threading.Condition()
        self._closing = False
        self._threads = [threading.Thread(target=self._work, name=f"afield-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    @property
    def rows(self) -> int:
        """Rows that wait."""
        return self._come - self._gone

    def waiting(self) -> Counter[int]:
        """Rows that wait, by the `id` of their engine; called in the event loop."""
        with self._changed:
            queued = list(self._queue)
        rows: Counter[int] = Counter()
        for one in (*queued, *self._arriving):
            rows[id(one.engine)] += one.rows
        return rows

    async def run(self, engine: Engine, arrays: Arrays, rows: int) -> Arrays:
        """The answers of an engine to some rows."""
        loop = asyncio.get_running_loop()
        if self._closing or self.rows + rows > max(self.max_queue, rows):
            raise Busy(f"{self.rows} rows are waiting, of {self.max_queue} that may: try again.")
        waiting = _Waiting(engine, arrays, rows, loop, loop.create_future())
        self._come += rows
        if not self._arriving:
            loop.call_soon(self._put)
        self._arriving.append(waiting)
        return await waiting.future

    def close(self) -> None:
        """Answer what is there, then stop."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _put(self) -> None:
        """Queue what has arrived in this turn of the event loop: with one lock, and to be answered together."""
        with self._changed:
            self._queue.extend(self._arriving)
            self._arriving.clear()
            self._changed.notify()

    def _work(self) -> None:
        while batch := self._take():
            self.on_batch(sum(one.rows for one in batch))
            outcomes = _answer(batch)
            for loop, group in itertools.groupby(zip(batch, outcomes, strict=True), lambda pair: pair[0].loop):
                with contextlib.suppress(RuntimeError):  # the event loop is gone
                    loop.call_soon_threadsafe(_settle, list(group))

    def _take(self) -> list[_Waiting]:
        """The next batch; empty: there will be none."""
        with self._changed:
            while not self._queue:
                if self._closing and not self._arriving:
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
            self._gone += sum(one.rows for one in batch)
            if self._queue or self._closing:
                self._changed.notify_all()
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


def _settle(pairs: list[tuple[_Waiting, Outcome]]) -> None:
    for one, outcome in pairs:
        if one.future.done():  # nobody waits any more
            continue
        if isinstance(outcome, BaseException):
            one.future.set_exception(outcome)
        else:
            one.future.set_result(outcome)


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
