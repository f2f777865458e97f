"""`import tinygrad_nv`: what it brings, what it does not load, and where models/ is found. Locked
packages: what the lock files pin is what pyproject.toml asks for, each by its hashes. What messages and
pages tell to install is there: every `pip install X` is a name or an extra of pyproject.toml.
`'.[extra]'` works in a checkout alone: it is for pages and scripts about one. Lazy imports: every place
that the code names as a string is there, and a matmul opens few files."""
from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import tinygrad
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tinygrad_nv
from tests.support import ROOT, with_root
from tinygrad_nv.benchmarks.engines import PACKAGES
from tinygrad_nv.tile.templates import TABLE


def run(script):
    return subprocess.run([sys.executable, "-c", script], env=with_root(), capture_output=True, text=True,
                          check=False)


def test_tinygrads_names_are_tinygrads_own_objects():
    for name in ("Tensor", "TinyJit", "Variable", "dtypes", "function", "Device", "Context", "nn"):
        assert getattr(tinygrad_nv, name) is getattr(tinygrad, name)
    assert all(hasattr(tinygrad_nv, name) for name in tinygrad_nv.__all__)


def test_import_loads_no_device_and_no_numpy():
    done = run("import sys, tinygrad_nv\n"
               "print(*[m for m in sys.modules if m.startswith(('tinygrad.runtime.ops_', 'numpy'))])")
    # what EMU and CUDA open is registered; neither the emulator, cuda-python nor dist is loaded
    assert (done.stdout, done.stderr) == ("tinygrad.runtime.ops_emu tinygrad.runtime.ops_cuda\n", "")
    done = run("import sys, tinygrad_nv\n"
               "print(*[m for m in sys.modules if m.startswith((\n"
               "    'tinygrad_nv.ptx.emulator', 'tinygrad_nv.dist', 'cuda', 'mpi4py', 'torch', 'jax'))])")
    assert (done.stdout, done.stderr) == ("\n", "")


def test_models_of_a_checkout_are_importable():
    done = run("import tinygrad_nv; print(*tinygrad_nv.__path__); import tinygrad_nv.models")
    assert done.stderr == ""


def test_nothing_helps_python_to_find_them():
    """No hook of importlib, but for that of DEV=CPU, which is about tinygrad's files."""
    done = run("import sys; before = list(sys.meta_path)\n"
               "import tinygrad_nv.models as models; print(models.__file__)\n"
               "print(*{type(each).__name__ for each in sys.meta_path if each not in before})")
    path = str(ROOT / "tinygrad_nv" / "models" / "__init__.py")
    assert done.stdout.split() == [path, "_CPUFinder"], done.stderr


def test_the_version_is_told_without_tinygrad():
    """By the command and by `-m`: the import of anything else would be seen as the time it takes."""
    done = run("import sys\n"
               "sys.argv[:] = ['tinygrad-nv', '--version']\n"
               "from tinygrad_nv.__main__ import main\n"
               "print(main(), *sorted(name for name in sys.modules if name.startswith('tinygrad.')))")
    assert done.stdout == f"tinygrad_nv {tinygrad_nv.__version__} tinygrad 0.14.0\n0\n", done.stderr
    command = [sys.executable, "-X", "importtime", "-m", "tinygrad_nv", "--version"]
    done = subprocess.run(command, env=with_root(), capture_output=True, text=True, check=True)
    assert done.stdout == f"tinygrad_nv {tinygrad_nv.__version__} tinygrad 0.14.0\n"
    imported = [line.split("|")[-1].strip() for line in done.stderr.splitlines()]
    assert not [name for name in imported if name.startswith("tinygrad.")]


def test_links_of_the_readme_work_from_an_index():
    """Pages and images are named by the address of the repository."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    home = project["project"]["urls"]["Homepage"]
    assert all(url.startswith(home) for url in project["project"]["urls"].values())
    readme = project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]

    def shown(text):
        for each in readme["substitutions"]: text = re.sub(each["pattern"], each["replacement"], text)
        return text
    pages = f"{home}/blob/main/"
    raw = f"{home.replace('//github.com', '//raw.githubusercontent.com')}/main/"
    for text, wanted in [
            ("[a](docs/a.md)", f"[a]({pages}docs/a.md)"), ("[a](docs/a.md#b)", f"[a]({pages}docs/a.md#b)"),
            ("[`a` b](a.md), [c](d.md)", f"[`a` b]({pages}a.md), [c]({pages}d.md)"),
            ("[a](https://b.c)", "[a](https://b.c)"), ("[a](#b)", "[a](#b)"),
            ("[a](mailto:b@c)", "[a](mailto:b@c)"),
            ("![a](b.svg)", f"![a]({raw}b.svg)"), ("![a](http://b.svg)", "![a](http://b.svg)"),
            ("[![a](b.svg)](c.md)", f"[![a]({raw}b.svg)]({pages}c.md)"),
            ("[![a](https://b.svg)](c.md)", f"[![a](https://b.svg)]({pages}c.md)"),
            ('<img width="9" src="b.svg">', f'<img width="9" src="{raw}b.svg">'),
            ('<a href="b.md">', f'<a href="{pages}b.md">'), ("x[0](y) [z]", f"x[0]({pages}y) [z]")]:
        assert shown(text) == wanted
    text = shown((ROOT / "README.md").read_text())
    relative = re.findall(r"\]\((?![a-z]+:|#)[^)]*\)|(?:src|href)=\"(?![a-z]+:|#)[^\"]*\"", text)
    assert not relative


def test_nothing_else_of_a_checkout_is_in_the_package():
    assert run("import tinygrad_nv.tests").returncode != 0
    assert run("import tinygrad_nv.models.llama").stderr == ""


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXCLUDED = {"torch"}    # its build (CPU, CUDA) is the machine's
LOCKS = {"tests": ("cpu", "test", "bench", "docs"), "serve": ("cpu", "image", "audio"),
         "cuda": ("cpu", "image", "audio", "cuda")}
# versions that the advisories of these packages name as mended
FLOORS = {"starlette": "0.49.0", "h11": "0.15.0", "pillow": "12.1.1", "cryptography": "46.0.6",
          "jinja2": "3.1.5", "python-multipart": "0.0.25", "pyarrow": "23.0.0", "pytest": "9.0.2"}


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_pins_what_the_project_asks_for(name: str):
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    assert "://" not in text
    pinned: dict[str, list[Requirement]] = {}
    for entry in re.split(r"\n(?=\S)", re.sub(r"(?m)^#.*\n", "", text)):
        words, *hashes = re.split(r" \\\n\s+--hash=sha256:", entry.strip())
        assert hashes, f"{words} has no hash"
        found = Requirement(words)
        pinned.setdefault(canonicalize_name(found.name), []).append(found)
    asked = [*PROJECT["dependencies"], *(each for extra in LOCKS[name]
                                         for each in PROJECT["optional-dependencies"][extra])]
    for wanted in map(Requirement, asked):
        if wanted.name in EXCLUDED: continue
        for found in pinned[canonicalize_name(wanted.name)]:
            version = next(iter(found.specifier)).version
            assert wanted.specifier.contains(version), f"{found}: {wanted}"


@pytest.mark.parametrize("name", FLOORS)
def test_no_version_with_an_advisory_is_accepted(name: str):
    every = [*PROJECT["dependencies"], *(each for extra in PROJECT["optional-dependencies"].values()
                                         for each in extra)]
    found = [each for each in map(Requirement, every) if canonicalize_name(each.name) == name]
    assert found
    assert not [each for each in found if each.specifier.contains(FLOORS[name])]


EXTRAS = PROJECT["optional-dependencies"]
CHECKOUT = [*ROOT.glob("*.md"), ROOT / "docs" / "start.md", *ROOT.glob("bench/*.md"),
            *ROOT.glob("bench/**/*.py")]
INSTALLED = [path for folder, kind in (("docs", "*.md"), ("tinygrad_nv", "*.py"), ("models", "*.py"))
             for path in (ROOT / folder).rglob(kind) if path not in CHECKOUT]
# text, and string literals that continue on the next line
JOINED = re.compile(r"""["']\n\s*f?["']""")
COMMAND = re.compile(r"pip install ([^:;)`\n\"{]+)")


def names() -> set[str]:
    """What the project depends on, with all extras."""
    listed = [*PROJECT["dependencies"], *(one for extra in EXTRAS.values() for one in extra)]
    return {re.split(r"[><=;\[ ]", one)[0].lower() for one in listed}


def wrong(command: str, checkout: bool = False) -> list[str]:
    """The words of a command that are no package or extra of the project."""
    bad = []
    if "--no-index" in command: return bad  # a file
    for word in re.sub(r"--no-deps|--require-hashes|-r requirements/\S+|--target \S+|'", "", command).split():
        if word in ("or", "on", "and", "besides", "in"): break
        if word == "-U" or (word == "-e" and checkout): continue
        own = re.fullmatch(r"(\.|tinygrad-nv)\[([a-z,-]+)\]", last := word.rstrip(",."))
        known = set(own[2].split(",")) <= set(EXTRAS) and (own[1] != "." or checkout) if own \
            else re.split(r"[><=]", last)[0].lower() in names()
        if not known: bad.append(word)
        if last != word: break
    return bad


def test_what_is_to_be_installed_is_known():
    unknown = [(path.name, found[0]) for path in [*CHECKOUT, *INSTALLED]
               for found in COMMAND.finditer(JOINED.sub("", path.read_text()).replace("pip\n", "pip "))
               if wrong(found[1], path in CHECKOUT)]
    assert unknown == []


@pytest.mark.parametrize("name", PACKAGES)
def test_peers_are_known(name: str): assert not wrong(PACKAGES[name])


@pytest.mark.parametrize("command", ["'.[cuda]'", "-e 'tinygrad-nv[cuda]'", "tinygrad-nv",
                                     "'tinygrad-nv[gpu]'", "ziglang nothing"])
def test_others_are_not(command: str): assert wrong(command)


PACKAGE = Path(tinygrad_nv.__file__).parent


def lazy_places() -> Iterator[str]:
    """Yields the arguments of all calls of `lazy_import`."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if "lazy_import(" not in (text := path.read_text()): continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "lazy_import":
                yield ast.literal_eval(node.args[0])


def lacks(place: str) -> bool:
    """Tells whether a module lacks the attribute of "module:attribute"."""
    module, _, name = place.partition(":")
    return not callable(getattr(import_module(module), name, None))


def test_every_place_is_there():
    places = list(lazy_places())
    assert len(places) > 10
    assert [place for place in places if lacks(place)] == []
    assert lacks("tinygrad_nv.patterns.gemm.match:rewrit")


CODE = """
import sys
import numpy as np
from tinygrad_nv import Tensor
def opened(): return {name for name in sys.modules if name.startswith("tinygrad_nv.")}
before = opened()
a, b = (Tensor(np.full((64, 64), n, np.float16)).realize() for n in (2, 3))
loaded = opened()
assert (a @ b).numpy()[5, 7] == 384
print(len(opened() - loaded), len(opened() - before), *opened())
"""


@pytest.mark.parametrize(("device", "matmul", "every"), [("CPU", 45, 60), ("EMU", 90, 160)])
def test_a_matmul_opens_few_files(device: str, matmul: int, every: int):
    """Nothing of other families: those for the matmul, and all since `import tinygrad_nv`."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True,
                          env={**os.environ, "DEV": device, "NV_SPEC": "0"})
    of_matmul, since_import, *names = done.stdout.split()
    assert int(of_matmul) <= matmul
    assert int(since_import) <= every
    others = {*TABLE.specs.values()} - {"gemm", "norm", "attention", "column_sum"}     # whose specs are read
    folders = tuple(f"tinygrad_nv.{kind}.{family}" for kind in ("tile", "cpu") for family in others)
    assert [name for name in names if name.startswith(("tinygrad_nv.quant", *folders))] == []


STORY = """
import sys
from pathlib import Path
from tinygrad_nv import LLM, SamplingParams, models
with LLM(Path(models.__file__).parent / "tales", max_num_seqs=1, max_model_len=32) as llm:
    assert llm.generate("Once", SamplingParams(temperature=0, max_tokens=2))[0].outputs[0].token_ids
print(*(name for name in sys.modules if name.startswith("tinygrad_nv.")))
"""


def test_a_text_model_opens_no_other_architectures():
    """Neither towers of images, nor encoders, experts, GGUF, or what writes kernels for GPUs."""
    done = subprocess.run([sys.executable, "-c", STORY], capture_output=True, text=True, check=True,
                          env={**os.environ, "DEV": "CPU", "NV_SPEC": "0"})
    names = done.stdout.split()
    assert "tinygrad_nv.models.llama" in names
    others = ("models.qwen_vl", "models.encoder", "models.embedding_model", "models.gguf.",
              "models.classifier", "engine.vision", "engine.embedding.embedder", "patterns.router.named",
              "patterns.quant_grouped", "patterns.scaled_gemm", "ptx.builder", "cpu.quant_gemm",
              "cpu.grouped_gemm", "cpu.attention")
    assert [name for name in names if name.startswith(tuple(f"tinygrad_nv.{each}" for each in others))] == []
