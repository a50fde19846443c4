"""Requests that are wrong in thousands of ways get an error of theirs, never one of the service."""

from pathlib import Path

import pytest

from bench.fuzz_service import fuzz, served
from tests.serve.conftest import running


@pytest.mark.parametrize("requests", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_request_is_answered_by_a_5xx(requests: int, tmp_path: Path):
    with running(served(), state=tmp_path, risk=0.1) as client:
        found = fuzz(client.port, requests)
    assert found.failures == []
    assert {200, 400, 404} <= set(found.statuses)
