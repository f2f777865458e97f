"""Scripts of bench/: each is in the table of bench/README.md, and says what its options are."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[3] / "bench"
SCRIPTS = sorted(path for path in BENCH.glob("*/*.py") if 'if __name__ == "__main__"' in path.read_text())
SIDES = {"decode_side.py", "step_side.py"}     # processes of gpu/run.py
HELP = """
import contextlib, io, runpy, sys
for path in sys.argv[1:]:
    sys.argv, before, out = [path, "--help"], sys.path[:], io.StringIO()
    with contextlib.redirect_stdout(out):
        try: runpy.run_path(path, run_name="__main__")
        except SystemExit as end: assert not end.code, (path, end.code)
    assert out.getvalue().startswith("usage: " + path.rsplit("/", 1)[1]), path
    sys.path[:] = before
"""


def test_each_script_is_in_the_table():
    text = (BENCH / "README.md").read_text()
    assert [path for path in SCRIPTS if path.name not in SIDES
            and f"`{path.relative_to(BENCH).as_posix()}" not in text] == []


def test_each_script_says_what_its_options_are(tmp_path: Path):
    """In one process, from a folder that is not the checkout. llama.cpp's runs in a Python that has it."""
    paths = [str(path) for path in SCRIPTS if path.name != "gguf_peer.py"]
    done = subprocess.run([sys.executable, "-c", HELP, *paths], capture_output=True, text=True, check=False,
                          cwd=tmp_path)
    assert done.returncode == 0, done.stderr
