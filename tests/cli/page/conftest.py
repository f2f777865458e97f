"""One browser and one server for all tests of the page; each test finds an empty page."""
from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.server.browser_case import Browser, browser
from tests.support.server.page_case import forget, open_page, until
from tests.support.server.serve_case import FakeEngine, FakeModel, Live, fake_service, live

PAUSE_S = 0.02


@pytest.fixture(scope="session")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    # what moves is drawn sixty times a second, without a GPU
    with browser(tmp_path_factory.mktemp("profile"), "--force-prefers-reduced-motion") as made: yield made


@pytest.fixture(scope="session")
def served() -> Iterator[tuple[Live, FakeEngine]]:
    engine = FakeEngine(FakeModel())
    with live(fake_service(engine)) as server: yield server, engine


@pytest.fixture
def engine(served: tuple[Live, FakeEngine]) -> FakeEngine:
    """It answers with its prompt, over and over, unless a test says something else."""
    engine = served[1]
    for name, value in vars(FakeEngine(engine.model, pause_s=PAUSE_S)).items(): setattr(engine, name, value)
    return engine


@pytest.fixture
def page(window: Browser, served: tuple[Live, FakeEngine], engine: FakeEngine) -> Iterator[Live]:
    """The page, ready, with nothing kept."""
    server = served[0]
    open_page(window, server)
    yield server
    forget(window, server)
    until(lambda: not engine.running)
