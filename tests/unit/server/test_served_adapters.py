"""Adapters by name: requests that ask for one, /v1/models, loading and unloading; with OpenAI's client."""
from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

import pytest

from tests.support.lazy import lazy
from tests.support.server.serve_case import NAME, FakeEngine, FakeModel, FakeStats, Live, fake_service, live
from tinygrad_nv.engine.lora.request import LoRARequest
from tinygrad_nv.engine.lora.slots import AdapterUse
from tinygrad_nv.errors import ModelError, RequestError
from tinygrad_nv.server.adapters import AdapterNames
from tinygrad_nv.server.metrics import Metrics
from tinygrad_nv.server.startup import lora_modules

openai = lazy("openai")


class Loader:
    """A loader that notes the adapters; a path with "bad" in it is none."""

    def __init__(self) -> None: self.loaded, self.removed = list[LoRARequest](), list[int]()

    def load(self, request: LoRARequest) -> None:
        if "bad" in request.lora_path: raise ModelError(f"{request.lora_path} is a file", "a directory")
        self.loaded.append(request)

    def remove(self, number: int) -> bool:
        self.removed.append(number)
        return True


@pytest.fixture
def engine() -> FakeEngine: return FakeEngine(FakeModel(), "a word")


@pytest.fixture
def served(engine: FakeEngine) -> Iterator[Live]:
    adapters = AdapterNames(Loader(), (NAME, "alias"), changes=True)
    adapters.add("french", "/adapters/french")
    with live(fake_service(engine, adapters=adapters, strict=True)) as made: yield made


def test_a_model_name_chooses_the_adapter(served: Live, engine: FakeEngine):
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="x")
    said = client.completions.create(model="french", prompt="hello", max_tokens=2)
    assert (said.model, engine.loras[-1].lora_name) == ("french", "french")
    talked = client.chat.completions.create(model="french", messages=[{"role": "user", "content": "hi"}])
    assert (talked.model, engine.loras[-1].lora_path) == ("french", "/adapters/french")
    for name in (NAME, "alias"):
        client.completions.create(model=name, prompt="hello", max_tokens=2)
        assert engine.loras[-1] is None
    with pytest.raises(openai.NotFoundError, match=r"expected: .*french"):
        client.completions.create(model="german", prompt="hello")


def test_models_are_listed_with_their_parent(served: Live):
    found = {each["id"]: each for each in served.http.get("/v1/models").json()["data"]}
    assert list(found) == [NAME, "alias", "french"]
    assert (found["french"]["parent"], found["french"]["root"]) == (NAME, "/adapters/french")
    assert (found[NAME]["parent"], found[NAME]["root"]) == (None, NAME)
    one = served.http.get("/v1/models/french").json()
    for each in (one, found["french"]): each["permission"][0].pop("id")     # drawn for each answer
    assert one == found["french"]


def test_clients_load_and_unload(served: Live, engine: FakeEngine):
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    german = {"lora_name": "german", "lora_path": "/adapters/german"}
    assert "added successfully" in served.post(german, load).text
    served.post({"model": "german", "prompt": "x"})
    first = engine.loras[-1]
    assert first.lora_name == "german"
    again = served.post(german, load)
    assert again.status_code == 400
    assert "'german' is served already" in again.json()["error"]["message"]
    assert served.post({**german, "load_inplace": True}, load).status_code == 200
    served.post({"model": "german", "prompt": "x"})
    assert engine.loras[-1].lora_int_id != first.lora_int_id
    assert "removed successfully" in served.post({"lora_name": "german"}, unload).text
    assert served.post({"model": "german", "prompt": "x"}).status_code == 404
    adapters = served.service.adapters
    assert adapters is not None
    loader = adapters.loader
    assert isinstance(loader, Loader)
    assert loader.removed == [first.lora_int_id, first.lora_int_id + 1]


@pytest.mark.parametrize(("path", "asked", "status", "words"), [
    ("load", {"lora_name": "x"}, 400, "lora_path is missing"),
    ("load", {"lora_path": "x"}, 400, "lora_name is missing"),
    ("load", {"lora_name": "x", "lora_path": "/bad"}, 400, "/bad is a file; expected: a directory"),
    ("load", {"lora_name": NAME, "lora_path": "/x"}, 400, "is served already"),
    ("load", {"lora_name": "a\nb", "lora_path": "/x"}, 400, "printable"),
    ("load", {"lora_name": "x", "lora_path": "/x", "lora": 1}, 400, "unknown field"),
    ("unload", {"lora_name": "x"}, 404, "no adapter 'x' is served")], ids=str)
def test_what_is_refused(served: Live, path: str, asked: dict[str, object], status: int, words: str):
    made = served.post(asked, f"/v1/{path}_lora_adapter")
    assert made.status_code == status
    assert words in made.json()["error"]["message"]


def test_loading_is_off_unless_it_was_asked_for(engine: FakeEngine):
    asked = {"lora_name": "x", "lora_path": "/x"}
    for adapters, status, words in ((AdapterNames(Loader(), (NAME,)), 403, "--allow-runtime-lora-updating"),
                                    (None, 404, "--enable-lora")):
        with live(fake_service(engine, adapters=adapters)) as made:
            refused = made.post(asked, "/v1/load_lora_adapter")
            assert (refused.status_code, words in refused.text) == (status, True)


def test_the_metric_of_adapters(engine: FakeEngine):
    told = FakeStats(1, adapters=AdapterUse(4, ("a", "b"), ("c",)))
    text = Metrics(NAME, 8, lambda: told, "vllm").text().decode()
    labels = 'max_lora="4",running_lora_adapters="a,b",waiting_lora_adapters="c"'
    assert f"vllm:lora_requests_info{{{labels}}} " in text
    assert "lora" not in Metrics(NAME, 8, engine.stats).text().decode()


def test_modules_of_the_command_line():
    given = ["a=/x", '{"name": "b", "path": "/y=z", "base_model_name": "base"}', "c=/p=q"]
    found = lora_modules(Namespace(lora_modules=given), ("base",))
    assert found == [("a", "/x"), ("b", "/y=z"), ("c", "/p=q")]


@pytest.mark.parametrize("text", ["a", "=x", "a=", "{", '{"name": "a"}', '{"name": 1, "path": "x"}',
                                  '{"name": "a", "path": "x", "rank": 3}'])
def test_modules_that_are_none(text: str):
    with pytest.raises(RequestError, match="NAME=PATH"): lora_modules(Namespace(lora_modules=[text]), ())


def test_a_module_of_another_base():
    text = '{"name": "a", "path": "x", "base_model_name": "other"}'
    with pytest.raises(RequestError, match="the base of 'a' is 'other'"):
        lora_modules(Namespace(lora_modules=[text]), ("base",))
