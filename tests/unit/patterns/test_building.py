"""Kernels of ours that do not build: tinygrad's own run in their place, and a warning says so."""
from __future__ import annotations

import numpy as np
import pytest
from tinygrad import helpers

from tinygrad_nv import Tensor, TinyJit, Variable, disabled, dtypes, explain
from tinygrad_nv.errors import ConfigError, NVError, ScheduleError
from tinygrad_nv.graphs import GraphPool, Input
from tinygrad_nv.hooks import rewrites as hook_rewrites
from tinygrad_nv.patterns import building, program, stable
from tinygrad_nv.patterns.attention import match as attention
from tinygrad_nv.patterns.gemm import match as gemm
from tinygrad_nv.patterns.norm import match as norm
from tinygrad_nv.runtime.note import Note
from tinygrad_nv.runtime.programs import programs_compiled
from tinygrad_nv.tile.attention.spec import AttentionSpec
from tinygrad_nv.tile.gemm.spec import GemmSpec

SPOILED_C = "this is no C;\n"
SPOILED_PTX = "\tadd.q32 %r1, %r1, 1;\n}"  # parsed, and refused by ptxas and the emulator alike


@pytest.fixture(autouse=True)
def lenient(monkeypatch):
    monkeypatch.setenv("NV_STRICT", "0")
    monkeypatch.setattr(building, "_good", set())
    monkeypatch.setattr(building, "_warned", set())
    monkeypatch.setattr(program, "refused", {})
    hook_rewrites.configured_cache.clear()  # what other tests have scheduled
    yield
    hook_rewrites.configured_cache.clear()


@pytest.fixture(params=["CPU", "EMU"])
def device(request): return request.param


@pytest.fixture
def spoiled(monkeypatch):
    """The text of every kernel of ours for a kind of spec cannot be compiled."""
    theirs = program.program

    def spoil(kind: type) -> None:
        def made(entry, text, where, *args, note=None, **kwargs):
            if note is not None and isinstance(note.spec, kind):
                text = SPOILED_C + text if where == "CPU" else text.rstrip().removesuffix("}") + SPOILED_PTX
            return theirs(entry, text, where, *args, note=note, **kwargs)
        monkeypatch.setattr(program, "program", made)
    return spoil


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


def placed(array: np.ndarray, device: str) -> Tensor:
    """A matrix of a type whose matmuls have kernels of ours on the device."""
    return Tensor(array.astype(np.float32 if device == "CPU" else np.float16), device=device)


def pair(device: str, n: int = 24) -> tuple[Tensor, Tensor]:
    return placed(values(16, 32), device), placed(values(32, n, seed=1), device)


def warnings_in(capsys) -> list[str]:
    err = capsys.readouterr().err
    return [line for line in err.splitlines() if line.startswith("tinygrad_nv:")]


# **** what a compiler refuses ****

@pytest.mark.sampled(1)
def test_the_answer_is_tinygrads_and_one_warning_says_why(device, spoiled, capsys):
    spoiled(GemmSpec)
    for _ in range(2):
        a, b = pair(device)
        np.testing.assert_array_equal((a @ b).numpy(), values(16, 32) @ values(32, 24, seed=1))
    said, = warnings_in(capsys)
    assert "does not build, tinygrad's own runs in its place" in said
    assert "NV_STRICT=1 raises" in said


def test_explain_says_why(device, spoiled):
    spoiled(GemmSpec)
    a, b = pair(device)
    (a @ b).realize()
    kernel, = explain(a @ b).kernels
    assert kernel.template is None
    assert "does not build" in kernel.reason
    assert ("ToolchainError" if device == "CPU" else "PTXError") in kernel.reason


def test_what_is_compiled_for_the_check_counts_as_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(helpers, "CACHEDB", str(tmp_path / "cache.db"))
    monkeypatch.setattr(helpers, "_db_connection", None)
    monkeypatch.setattr(helpers, "_db_tables", set())
    a, b = (each.realize() for each in pair("CPU", 30))
    before = programs_compiled()
    (a @ b).realize()
    assert programs_compiled() == before + 1


def test_explain_compiles_nothing(spoiled):
    spoiled(GemmSpec)
    a, b = pair("CPU")
    assert explain(a @ b).kernels[-1].template is not None
    assert not program.refused
    assert (a @ b).tolist() == (values(16, 32) @ values(32, 24, seed=1)).tolist()


def test_a_gradient(device, spoiled, capsys):
    spoiled(GemmSpec)
    a, b = pair(device)
    grad, = (a @ b).sum().gradient(b)
    np.testing.assert_array_equal(grad.numpy(), np.repeat(values(16, 32).sum(0)[:, None], 24, 1))


@pytest.mark.sampled(1)
def test_a_captured_step_and_its_replays(device, spoiled, capsys):
    spoiled(GemmSpec)
    w = pair(device)[1].realize()
    step = TinyJit(lambda x: ((x @ w).relu() + 1).realize())
    for turn in range(4):
        x = values(16, 32, seed=turn)
        got = step(placed(x, device).realize()).numpy()
        np.testing.assert_array_equal(got, np.maximum(x @ values(32, 24, seed=1), 0) + 1)
    assert len(warnings_in(capsys)) == 1


def test_the_step_of_a_graph_pool(spoiled, capsys):
    spoiled(GemmSpec)
    w = pair("EMU")[1].realize()
    pool = GraphPool(lambda x: (x @ w).relu(), {"x": Input((32,), dtypes.half, 0)}, (8, 16), "EMU")
    for rows in (5, 16, 7, 16):
        x = values(rows, 32, seed=rows)
        got = pool(x=x.astype(np.float16)).numpy()
        np.testing.assert_array_equal(got, np.maximum(x @ values(32, 24, seed=1), 0))
    counts = [pool.buckets[size].counts for size in pool.sizes]
    assert [(each.captures, each.eager) for each in counts] == [(1, 0), (1, 0)], pool.stats()
    assert len(warnings_in(capsys)) == 2    # a kernel for each size


def test_other_kernels_of_the_graph_stay_ours(spoiled, capsys):
    spoiled(GemmSpec)
    a, b = pair("CPU")
    graph = (a @ b).softmax()
    a, b = pair("CPU")
    with disabled(): wanted = (a @ b).softmax().numpy()
    np.testing.assert_allclose(graph.numpy(), wanted, rtol=1e-6)
    a, b = pair("CPU")
    assert "norm" in [kernel.template for kernel in explain((a @ b).softmax()).kernels]


@pytest.mark.sampled(1)
def test_bound_variables_and_writes_in_place(device, spoiled):
    spoiled(GemmSpec)
    rows = Variable("rows", 1, 16).bind(5)
    kept = placed(values(16, 24, seed=3), device).realize()
    a, b = pair(device)
    kept[:5].assign(kept[:5] + a[:5] @ b).realize()
    want = values(16, 24, seed=3)
    want[:5] += values(16, 32)[:5] @ values(32, 24, seed=1)
    np.testing.assert_array_equal(kept.numpy(), want)
    got = (a[:rows] @ b).sum(0).numpy()
    np.testing.assert_array_equal(got, (values(16, 32)[:5] @ values(32, 24, seed=1)).sum(0))


@pytest.mark.slow
@pytest.mark.sampled(1)
def test_a_function_known_by_name_is_computed_by_its_body(device, spoiled, capsys):
    spoiled(AttentionSpec)
    half = values(1, 2, 64, 64) / 4
    q, k, v = (Tensor(half, device=device).half() for _ in range(3))
    got = q.scaled_dot_product_attention(k, v, is_causal=True).float().numpy()
    with disabled(): want = q.scaled_dot_product_attention(k, v, is_causal=True).float().numpy()
    np.testing.assert_allclose(got, want, atol=2e-3)
    assert warnings_in(capsys)


def test_a_kernel_of_a_users_own_is_the_users_business(spoiled, capsys):
    x = Tensor(values(8)).realize()
    call = program.program("own", SPOILED_C, "CPU", [program.Output((8,), x.dtype)], [x.uop],
                           note=Note("own"))
    with pytest.raises(NVError, match="did not compile"): Tensor(call[0]).realize()
    assert not warnings_in(capsys)


# **** what a template raises ****

@pytest.mark.parametrize("error", [ScheduleError("no such tile"), KeyError("a bug")])
def test_a_template_that_raises(device, error, monkeypatch, capsys):
    def raises(*_): raise error
    monkeypatch.setattr(gemm, "call_kernel", raises)
    for _ in range(2):
        a, b = pair(device)
        np.testing.assert_array_equal((a @ b).numpy(), values(16, 32) @ values(32, 24, seed=1))
    assert len(warnings_in(capsys)) == 1
    assert type(error).__name__ in explain(a @ b).kernels[0].reason
    monkeypatch.setenv("NV_STRICT", "1")
    with pytest.raises(type(error)): (a @ b).realize()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("module", "call"), [(norm, "_call_kernel"), (attention, "call_kernel")])
def test_rows_and_attention_that_raise(module, call: str, monkeypatch, capsys):
    def raises(*_, **__): raise KeyError("a bug")
    monkeypatch.setattr(module, call, raises)
    x = values(16, 16) / 4
    q = Tensor(x)
    weights = np.exp(x @ x.T - (x @ x.T).max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    graph, want = ((q @ q.T).softmax(), weights) if module is norm else ((q @ q.T).softmax() @ q, weights @ x)
    np.testing.assert_allclose(graph.numpy(), want, rtol=1e-5, atol=1e-6)
    assert len(warnings_in(capsys)) == 1


@pytest.mark.parametrize(("module", "name"), [(gemm, "match_matmul"), (stable, "_pair")])
def test_matching_that_raises(module, name, monkeypatch, capsys):
    def raises(*_, **__): raise KeyError("a bug")
    monkeypatch.setattr(module, name, raises)
    a, b = pair("CPU")
    np.testing.assert_array_equal((a @ b).numpy(), values(16, 32) @ values(32, 24, seed=1))
    grad, = a.sigmoid().sum().gradient(a)
    assert grad.numpy().max() == 0.25
    said, = warnings_in(capsys)
    assert "the rewrite fails, tinygrad's own runs in its place: KeyError" in said


def test_a_matcher_that_raises_is_told(monkeypatch):
    def raises(*_, **__): raise KeyError("a bug")
    monkeypatch.setattr(gemm, "match_matmul", raises)
    a, b = pair("CPU")
    assert "KeyError" in str(explain(a @ b))


# **** errors ****

def test_NV_STRICT_raises_what_the_compiler_says(device, spoiled, monkeypatch, capsys):
    monkeypatch.setenv("NV_STRICT", "1")
    spoiled(GemmSpec)
    a, b = pair(device)
    with pytest.raises(NVError): (a @ b).numpy()
    assert not warnings_in(capsys)


def test_NV_STRICT_is_a_schedule_of_its_own(spoiled, monkeypatch):
    """What was scheduled unchecked is scheduled again."""
    spoiled(GemmSpec)
    a, b = pair("CPU", 28)
    monkeypatch.setenv("NV_STRICT", "1")
    with pytest.raises(NVError): (a @ b).numpy()
    monkeypatch.setenv("NV_STRICT", "0")
    a, b = pair("CPU", 28)
    assert (a @ b).shape == (a @ b).numpy().shape


def test_a_users_own_errors_are_raised(monkeypatch, capsys):
    with pytest.raises(RuntimeError, match="cannot dot"): Tensor.ones(3, 4) @ Tensor.ones(5, 6)
    monkeypatch.setenv("NV_GEMM", "7")
    a, b = pair("CPU")
    with pytest.raises(ConfigError): (a @ b).realize()
    assert not warnings_in(capsys)
