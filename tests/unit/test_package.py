"""`import tinygrad_nv`: what it brings, what it does not load, and where models/ is found."""
import re
import subprocess
import sys
import tomllib

import tinygrad

import tinygrad_nv
from tests.support import ROOT, with_root


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
