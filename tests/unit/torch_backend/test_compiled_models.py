"""Models of transformers under torch.compile(backend="tinygrad_nv"): results, gradients and decode steps
against float64."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tinygrad.uop.ops import Ops
from transformers import DynamicCache, StaticCache

import tinygrad_nv.torch
from tests.support.torch_backend import compiled_case as case
from tinygrad_nv.graphs.launches import Launches
from tinygrad_nv.runtime.note import note_of


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NV_STRICT", "1")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", [
    "vit", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "llama"))])
def test_results(name: str):
    model, given = case.made(name), case.inputs(name)
    compiled, exact = torch.compile(model, backend="tinygrad_nv"), case.double(model)
    with torch.no_grad():
        for _ in range(2):
            case.close(compiled(**given)[0], model(**given)[0],
                       exact(**{key: case.double(each) for key, each in given.items()})[0])
        report = tinygrad_nv.torch.explain(compiled, **given)
    assert report.whole
    assert [graph.captures for graph in report.graphs] == [1]


def test_norms_of_bert_are_computed_once(monkeypatch: pytest.MonkeyPatch):
    """Each is the input of matmuls and the residual behind them: one kernel, which they read. The mask and
    what reads tokens are all that is tinygrad's."""
    made, init = list[Launches](), Launches.__init__

    def kept(self: Launches, *args: Any) -> None:
        init(self, *args)
        made.append(self)
    monkeypatch.setattr(Launches, "__init__", kept)
    model, given = case.made("bert"), case.inputs("bert")
    with torch.no_grad():
        case.close(torch.compile(model, backend="tinygrad_nv")(**given)[0], model(**given)[0],
                   case.double(model)(**{key: case.double(each) for key, each in given.items()})[0])
    notes = [note_of(call.src[0]) for call in made[0].linear.src if call.src[0].op is Ops.PROGRAM]
    assert sum(note is not None and note.template == "norm" for note in notes) \
        == 2 * model.config.num_hidden_layers + 1
    assert sum(note is None for note in notes) <= 8


@pytest.mark.parametrize("name", [
    "llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "gpt2", "vit"))])
def test_gradients(name: str):
    model, given = case.made(name), case.inputs(name)
    compiled, exact = torch.compile(model, backend="tinygrad_nv"), case.double(model)
    with torch.no_grad(): weight = torch.randn(model(**given)[0].shape)
    wanted = case.gradients(exact, exact, {key: case.double(each) for key, each in given.items()},
                            weight.double())
    theirs = case.gradients(model, model, given, weight)
    for _ in range(2):
        ours = case.gradients(compiled, model, given, weight)
        assert ours.keys() == wanted.keys()
        # what is summed up to 0, as the gradient of a bias of keys is, has errors of the size of others
        least = max(float(each.abs().max()) for each in wanted.values()) * case.EPSILON
        for key in wanted:
            mistake = float((ours[key].double() - wanted[key]).abs().max())
            allowed = float((theirs[key].double() - wanted[key]).abs().max())
            assert mistake <= case.TIMES * allowed + least, key


def test_decode_with_a_static_cache():
    model, tokens = case.made("llama"), torch.randint(61, (1, 9))
    compiled = torch.compile(model, backend="tinygrad_nv")
    with torch.no_grad():
        theirs, exact = model(tokens)[0], case.double(model)(tokens)[0]
        cache = StaticCache(config=model.config, max_cache_len=16)
        case.close(compiled(tokens[:, :4], past_key_values=cache)[0], theirs[:, :4], exact[:, :4])
        memory = cache.layers[0].keys.data_ptr()
        for i in range(4, 9):
            made = compiled(tokens[:, i:i + 1].clone(), past_key_values=cache)[0]
            case.close(made[:, 0], theirs[:, i], exact[:, i])
        assert cache.layers[0].keys.data_ptr() == memory, "the cache is written in place"
        assert cache.layers[0].keys[:, :, 9:].abs().max() == 0
        report = tinygrad_nv.torch.explain(compiled, tokens[:, :1].clone(), past_key_values=cache)
    assert report.whole
    assert [graph.captures for graph in report.graphs] == [1], "one capture serves all positions"


@pytest.mark.slow
def test_decode_with_a_dynamic_cache():
    model, tokens = case.made("llama"), torch.randint(61, (1, 7))
    compiled = torch.compile(model, backend="tinygrad_nv")
    with torch.no_grad():
        theirs, exact = model(tokens)[0], case.double(model)(tokens)[0]
        cache = DynamicCache(config=model.config)
        compiled(tokens[:, :4], past_key_values=cache)
        for i in range(4, 7):
            made = compiled(tokens[:, i:i + 1].clone(), past_key_values=cache)[0]
            case.close(made[:, 0], theirs[:, i], exact[:, i])


@pytest.mark.slow
def test_the_gradient_of_what_is_frozen_is_not_asked_for():
    model, given, weight = case.made("llama"), case.inputs("llama"), torch.ones(2, 7, 61)
    model.model.requires_grad_(False)
    ours = case.gradients(torch.compile(model, backend="tinygrad_nv"), model, given, weight)
    assert ours.keys() == {"lm_head.weight"}
    exact = case.double(model)
    wanted = case.gradients(exact, exact, given, weight.double())
    theirs = case.gradients(model, model, given, weight)
    case.close(*(each["lm_head.weight"] for each in (ours, theirs, wanted)))
