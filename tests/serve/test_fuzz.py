"""Requests that are wrong in thousands of ways get an error of theirs, never one of the service."""

import pytest

from afield.serve.models import Source
from afield.serve.open_torch import open_sngp
from bench.fuzz_service import fuzz
from tests.serve.conftest import fitted, running


@pytest.mark.parametrize("requests", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_request_is_answered_by_a_5xx(requests: int):
    engine = open_sngp(fitted())
    with running([Source("m", lambda path: engine)]) as client:
        found = fuzz(client.port, requests)
    assert found.failures == []
    assert {200, 400, 404} <= set(found.statuses)
