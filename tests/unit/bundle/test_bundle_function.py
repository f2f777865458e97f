"""Functions of Tensors as bundles: the same bits, in another process, without a compiler; forged plans."""
from __future__ import annotations

import copy
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinygrad import Tensor, dtypes, nn
from tinygrad.helpers import Context

import tinygrad_nv
from tinygrad_nv.bundle.container import Source, open_bundle, write_bundle
from tinygrad_nv.bundle.manifest import canonical
from tinygrad_nv.engine.bundled.function import CompiledFunction
from tinygrad_nv.errors import BundleError
from tinygrad_nv.functional import convolution

# another process: no compiler, no process that it could run, nothing scheduled
PROGRAM = """
import os, subprocess, sys
def refuse(*args, **kwargs): raise SystemExit(f"a process: {args}")
subprocess.Popen.__init__ = refuse
import numpy as np, tinygrad_nv, tinygrad.schedule, tinygrad.engine.realize
from tinygrad_nv.runtime.cpu import clang
def compiled(*args): raise SystemExit(f"compiled: {args[-1][:80]}")
clang.ToolchainCompiler.compile = clang.ClangRenderer.compiler = compiled
fn = tinygrad_nv.load(sys.argv[1])
given = np.load(sys.argv[2])
found = fn(*(given[each] for each in given))
np.savez(sys.argv[3], *(each.numpy() for each in (found if isinstance(found, tuple) else (found,))))
print(tinygrad_nv.runtime.programs.programs_known())
"""


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return Tensor(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).realize()


def network() -> Callable[..., Any]:
    Tensor.manual_seed(0)
    first, second, norm = nn.Linear(24, 32), nn.Linear(32, 8), nn.LayerNorm(32)

    def forward(x: Tensor, i: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = norm(first(x)).gelu()
        return second(h).softmax(), i * 2, (h @ h.T).max()
    return forward


def test_another_process_has_the_same_bits(tmp_path: Path) -> None:
    fn, x, i = network(), drawn(16, 24), Tensor(np.arange(5, dtype=np.int32)).realize()
    made = tinygrad_nv.compile(fn, x, i)
    wanted = [each.numpy() for each in made(x, i)]
    for a, b in zip(made(x, i), wanted, strict=True): np.testing.assert_array_equal(a.numpy(), b)
    # eager, kernels are fused in other ways
    for a, b in zip(fn(x, i), wanted, strict=True): np.testing.assert_allclose(a.numpy(), b, 1e-5)
    made.save(tmp_path / "f.tnv")
    np.savez(tmp_path / "in.npz", x=x.numpy(), i=i.numpy())
    done = subprocess.run([sys.executable, "-c", PROGRAM, *(str(tmp_path / each) for each in
                                                            ("f.tnv", "in.npz", "out.npz"))],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0"]
    found = np.load(tmp_path / "out.npz")
    for each, b in zip(found.files, wanted, strict=True): np.testing.assert_array_equal(found[each], b)


def test_results_are_values_and_arguments_are_not_written() -> None:
    made = tinygrad_nv.compile(lambda x: x + 1, drawn(4))
    x = drawn(4, seed=1)
    before = x.numpy()
    first = made(x)
    second = made(x.numpy() * 3)
    np.testing.assert_array_equal(first.numpy(), before + 1)
    np.testing.assert_array_equal(second.numpy(), before * 3 + 1)
    np.testing.assert_array_equal(x.numpy(), before)
    np.testing.assert_array_equal(made(x[:2].cat(x[2:])).numpy(), before + 1)      # not realized yet


@pytest.mark.parametrize("returned", [
    lambda x: {"a": x * 2, "b": [x, (x.sum(),)]}, lambda x: [x, x], lambda x: (x.reshape(2, 2).T,),
    lambda x: x.cast(dtypes.bfloat16), lambda x: (x > 0, x.cast(dtypes.int8)), lambda x: x[:0].sum()],
    ids=range(6))
def test_structures(returned: Callable[[Tensor], Any], tmp_path: Path) -> None:
    x = drawn(4)
    made = tinygrad_nv.compile(returned, x)
    made.save(tmp_path / "f.tnv")
    made.save(tmp_path / "g.tnv")
    assert (tmp_path / "f.tnv").read_bytes() == (tmp_path / "g.tnv").read_bytes()
    loaded = tinygrad_nv.load(tmp_path / "f.tnv")

    def same(a: Any, b: Any) -> None:
        assert type(a) is type(b)
        if isinstance(a, Tensor):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            np.testing.assert_array_equal(a.float().numpy(), b.float().numpy())
        else:
            assert len(a) == len(b)
            for one, other in zip(*((each.items() if isinstance(each, dict) else each) for each in (a, b)),
                                  strict=True):
                if isinstance(a, dict): assert one[0] == other[0]
                same(one[1] if isinstance(a, dict) else one, other[1] if isinstance(a, dict) else other)
    for fn in (made, loaded): same(fn(x), returned(x))


def test_state_begins_anew_with_each_load(tmp_path: Path) -> None:
    counter = Tensor.zeros(1).contiguous().realize()

    def counted(x: Tensor) -> Tensor: return x + counter.assign(counter + 1)
    x = Tensor.zeros(1).contiguous().realize()
    made = tinygrad_nv.compile(counted, x)
    made.save(tmp_path / "f.tnv")
    assert [made(x).item() for _ in range(3)] == [2, 3, 4]      # once for the examples
    for _ in range(2):
        loaded = tinygrad_nv.load(tmp_path / "f.tnv")
        assert [loaded(x).item() for _ in range(3)] == [2, 3, 4]


def test_on_an_emulated_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMU_CHECK", "0")
    with Context(DEV="EMU"):
        x, w = drawn(64, 64), drawn(64, 64, seed=1)
        made = tinygrad_nv.compile(lambda x: (x.half() @ w.half()).float().relu(), x)
        made.save(tmp_path / "f.tnv")
        wanted = made(x).numpy()
        found = tinygrad_nv.load(tmp_path / "f.tnv")(x).numpy()
    np.testing.assert_array_equal(found, wanted)
    rows = open_bundle(tmp_path / "f.tnv").json("sm_90a/programs.json")
    assert any("note" in row for row in rows)
    with pytest.raises(BundleError, match="has kernels for sm_90a; CPU is cpu-"):
        tinygrad_nv.load(tmp_path / "f.tnv", "CPU")


def test_im2col_maps_of_an_emulated_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution by wgmma: its launch has corners and steps of base pixels."""
    monkeypatch.setenv("EMU_CHECK", "0")
    with Context(DEV="EMU"):
        x, w = drawn(1, 6, 5, 32), drawn(16, 3, 3, 32, seed=1)
        how: dict[str, Any] = {"stride": (1, 2), "padding": (1, 1, 1, 1)}
        made = tinygrad_nv.compile(lambda x: convolution(x.half(), w.half(), **how), x)
        made.save(tmp_path / "f.tnv")
        wanted = made(x).numpy()
        found = tinygrad_nv.load(tmp_path / "f.tnv")(x).numpy()
    np.testing.assert_array_equal(found, wanted)
    rows = open_bundle(tmp_path / "f.tnv").json("sm_90a/programs.json")
    maps = [each for row in rows for each in row.get("launch", {}).get("maps", ())]
    assert [each["steps"] for each in maps if each["lower"]] == [[1, 2, 1, 1]]


@pytest.mark.parametrize(("arguments", "words"), [
    ((), "0 arguments"), ((np.zeros(3, np.float32),), r"an array float32\[3\]"),
    ((np.zeros(4),), r"an array float64\[4\]"), ((np.zeros(4, np.int32),), r"an array int32\[4\]"),
    ((1.0,), "is 1.0"), (([0.0] * 4,), "is "), ((Tensor.zeros(4).cast(dtypes.half),), r"f16\[4\] on CPU")])
def test_other_arguments(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(BundleError, match=words): tinygrad_nv.compile(lambda x: x * 2, drawn(4))(*arguments)


@pytest.mark.parametrize(("fn", "words"), [
    (lambda x: None, "returns a NoneType"), (lambda x: (x, 1), "returns a int"), (lambda x: (), "no Tensor"),
    (lambda x: {1: x}, "returns a dict")])
def test_functions_that_are_none(fn: Callable[[Tensor], Any], words: str) -> None:
    with pytest.raises(BundleError, match=words): tinygrad_nv.compile(fn, drawn(4))


def test_examples_that_are_none() -> None:
    for examples in ((), (1,), (drawn(2), None)):
        with pytest.raises(BundleError, match="examples"):
            tinygrad_nv.compile(lambda *x: x[0], *examples)  # type: ignore[arg-type]


# **** forged plans: every hash fits ****

@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundled") / "f.tnv"
    tinygrad_nv.compile(network(), drawn(16, 24), Tensor(np.arange(5, dtype=np.int32)).realize()).save(path)
    return path


def changed(bundled: Path, name: str, change: Callable[[Any], Any]) -> Path:
    """The bundle with another part, whose hash fits."""
    bundle = open_bundle(bundled)
    sources = [Source(each, bundle.read(each) if not each.endswith(name)
                      else canonical(change(bundle.json(each)))) for each in bundle.parts]
    target = bundled.with_name("forged.tnv")
    write_bundle(target, "function", bundle.manifest.about, sources)
    return target


def mutated(draw: random.Random, found: Any) -> Any:
    """JSON with one value changed, at any depth."""
    found = copy.deepcopy(found)
    at = found
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys: return found
        key = draw.choice(keys)
        inner = at[key]
        if isinstance(inner, dict | list) and inner and draw.random() < 0.85: at = inner
        else: break
    new = draw.choice([None, -1, 1 << 40, 1 << 70, 0, "x", [], {}, 1.5, True, "lambda: 0", [1, 2, 3]])
    if isinstance(at, list) and draw.random() < 0.3: del at[key]
    elif new == inner and type(new) is type(inner): at[key] = "other"
    else: at[key] = new
    return found


@pytest.mark.parametrize("name", ["set.json", "programs.json", "steps/0.json"])
def test_forged_plans_raise_what_a_user_can_read(bundled: Path, name: str) -> None:
    """Not every change is wrong (a name, a note, work that is only reported): none raises anything else."""
    draw, refused = random.Random(len(name)), 0
    for _ in range(100):
        try: tinygrad_nv.load(changed(bundled, name, lambda found: mutated(draw, found)))
        except BundleError: refused += 1
    assert refused > 40


@pytest.mark.parametrize(("name", "change", "words"), [
    ("steps/0.json", lambda s: {**s, "places": [["none", *s["places"][0][1:]], *s["places"][1:]]},
     "no memory has the name"),
    ("steps/0.json", lambda s: {**s, "places": [[*s["places"][0][:3], 1 << 30, 0], *s["places"][1:]]},
     "ends behind its memory"),
    ("steps/0.json", lambda s: {**s, "places": [[s["places"][0][0], 1, *s["places"][0][2:]],
                                                *s["places"][1:]]}, "elements where"),
    ("programs.json", lambda p: [{**p[0], "code": [1 << 30, 8]}, *p[1:]], "ends behind the part"),
    ("programs.json", lambda p: [{**p[0], "globals": [99]}, *p[1:]], "an argument that it lacks"),
    ("set.json", lambda s: {**s, "memory": dict.fromkeys(s["memory"], 4)}, "has 4 bytes of input.0"),
    ("set.json", lambda s: {**s, "native": ["avx9999"]}, "lacks avx9999"),
    ("set.json", lambda s: {**s, "tree": {"tuple": [0, 99]}}, "has a structure"),
    ("set.json", lambda s: {**s, "inputs": [[[1 << 40] * 70, "f32"]]}, "has an argument")])
def test_what_is_said_of_forged_plans(bundled: Path, name: str, change: Callable[[Any], Any],
                                      words: str) -> None:
    with pytest.raises(BundleError, match=words): tinygrad_nv.load(changed(bundled, name, change))


def test_a_model_is_no_function(tmp_path: Path, bundled: Path) -> None:
    write_bundle(tmp_path / "m.tnv", "model", {"sets": []}, [])
    with pytest.raises(BundleError, match="the bundle of a model"): tinygrad_nv.load(tmp_path / "m.tnv")
    with pytest.raises(BundleError, match="the bundle of a function"): tinygrad_nv.LLM(bundled)
    loaded = tinygrad_nv.load(bundled)
    assert isinstance(loaded, CompiledFunction)
    with pytest.raises(BundleError, match="that was loaded"): loaded.save(tmp_path / "x.tnv")
