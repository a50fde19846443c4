"""Batches: requests are joined and parted again, a bad neighbour harms nobody, nothing that was taken is lost."""

import asyncio
from typing import Any

import numpy as np
import pytest

pytest.importorskip("orjson")
from afield.serve.batching import Batcher, Busy
from afield.serve.engine import BadInput, Engine, TensorSpec


def make_engine(calls: list[int], joins: bool = True) -> Engine:
    def run(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        x = arrays["x"]
        calls.append(len(x))
        if (x < 0).any():
            raise BadInput("negative")
        return {"score": x.sum(1), "wide": x * 2}

    return Engine((TensorSpec("x", "FP32", (-1, 2)),), run, "e", "test", joins=joins)


async def ask_all(batcher: Batcher, engine: Engine, inputs: list[np.ndarray]) -> list[Any]:
    tasks = [batcher.run(engine, {"x": x}, len(x)) for x in inputs]
    return await asyncio.gather(*tasks, return_exceptions=True)


def rows(*values: float) -> np.ndarray:
    return np.array([[v, v] for v in values], dtype=np.float32)


@pytest.mark.parametrize("joins", [True, False])
def test_answers_come_back_to_those_who_asked(joins: bool):
    calls: list[int] = []
    batcher = Batcher(1, max_batch=16, max_wait=0.05, expected=lambda: 1)
    inputs = [rows(*range(i, i + 1 + i % 3)) for i in range(20)]
    found = asyncio.run(ask_all(batcher, make_engine(calls, joins), inputs))
    batcher.close()
    for x, answers in zip(inputs, found, strict=True):
        assert np.array_equal(answers["score"], x.sum(1))
        assert np.array_equal(answers["wide"], 2 * x)
    assert max(calls) <= (16 if joins else 3)
    assert (len(calls) < 20) == joins


def test_a_bad_row_harms_no_neighbour():
    calls: list[int] = []
    batcher = Batcher(1, max_wait=0.05, expected=lambda: 1)
    found = asyncio.run(ask_all(batcher, make_engine(calls), [rows(1), rows(-1), rows(2)]))
    batcher.close()
    assert isinstance(found[1], BadInput)
    assert [found[i]["score"].tolist() for i in (0, 2)] == [[2], [4]]


def test_rows_of_other_shapes_are_not_joined():
    calls: list[int] = []
    batcher = Batcher(1, max_wait=0.02, expected=lambda: 1)
    wide = np.ones((2, 3), dtype=np.float32)
    found = asyncio.run(ask_all(batcher, make_engine(calls), [rows(1), wide, rows(2)]))
    batcher.close()
    assert [len(answers["score"]) for answers in found] == [1, 2, 1]


def test_a_full_queue_refuses_and_a_closing_one_answers_what_it_has():
    calls: list[int] = []
    batcher = Batcher(1, max_batch=2, max_queue=6)
    found = asyncio.run(ask_all(batcher, make_engine(calls), [rows(i) for i in range(40)]))
    refused = [answer for answer in found if isinstance(answer, Busy)]
    assert len(refused) + sum(calls) == 40
    batcher.close()
    assert batcher.rows == 0
    with pytest.raises(Busy):
        asyncio.run(batcher.run(make_engine(calls), {"x": rows(1)}, 1))


def test_one_request_alone_does_not_wait():
    import time

    batcher = Batcher(1, max_wait=5.0)
    start = time.monotonic()
    asyncio.run(ask_all(batcher, make_engine([]), [rows(1)]))
    assert time.monotonic() - start < 2
    batcher.close()
