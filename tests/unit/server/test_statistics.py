"""Statistics that the server shows: those that the engine has when they are asked for."""
from __future__ import annotations

import asyncio
import contextlib
import logging

import httpx
import pytest

from tests.support.server.serve_case import FakeEngine, FakeModel, FakeStats, fake_service, live
from tinygrad_nv.server.log import LOG, periodic


class LateEngine(FakeEngine):
    """Its statistics are those of the last `refresh_stats`, as of several replicas."""

    def stats(self) -> FakeStats: return FakeStats(self.refreshed, generated_tokens=10 * self.refreshed)


def test_metrics() -> None:
    with live(fake_service(LateEngine(FakeModel()))) as running:
        for count in (1, 2):
            text = httpx.get(f"{running.url}/metrics", timeout=10).text
            assert f'num_requests_running{{model_name="tales"}} {count}.0' in text


def test_the_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOG, "propagate", False)
    monkeypatch.setattr(LOG, "handlers", [caplog.handler])  # this alone, whatever pytest has put there
    async def some_lines() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(periodic(fake_service(LateEngine(FakeModel())), 0.02), 0.2)
    with caplog.at_level(logging.INFO, LOG.name): asyncio.run(some_lines())
    assert "engine running=1 " in caplog.messages[0]
    assert "engine running=2 " in caplog.messages[1]
