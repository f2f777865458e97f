"""upstream.patch: it applies to the released tinygrad, and the hooks work through it as they do without."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tinygrad

from tinygrad_nv import hooks

ROOT = Path(__file__).resolve().parents[3]
PATCH = ROOT / "upstream.patch"
pytestmark = [pytest.mark.skipif(shutil.which("git") is None, reason="needs git"),
              pytest.mark.skipif(hooks.official(), reason="this tinygrad has the patch already")]


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """A directory with a patched copy of the installed tinygrad."""
    there = tmp_path_factory.mktemp("patched")
    shutil.copytree(Path(tinygrad.__file__).parent, there / "tinygrad")
    for arguments in (["--check"], []):
        command = ["git", "apply", *arguments, str(PATCH)]
        done = subprocess.run(command, cwd=there, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
    return there


def run(there, *arguments, **env):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(there), str(ROOT)]), "DEV": "CPU", **env}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def test_patch_touches_tinygrad_alone_and_little_of_it():
    lines = PATCH.read_text().splitlines()
    files = [line.removeprefix("+++ b/") for line in lines if line.startswith("+++ ")]
    assert files == [f"tinygrad/{file}.py" for file in (
        "device", "engine/realize", "runtime/ops_cuda", "schedule/__init__", "uop/ops")]
    assert sum(line.startswith("+") for line in lines) - len(files) < 70


def test_all_hooks_pass_their_tests_through_the_plugin_points(patched):
    files = [f"tests/unit/hooks/test_hooks{part}.py" for part in ("", "_off", "_by_name")]
    out = run(patched, "-m", "pytest", "-q", *files, EXPECT_OFFICIAL="1")
    assert " failed" not in out


def test_nothing_of_a_patched_tinygrad_is_replaced(patched):
    run(patched, "-c", """
from tinygrad import schedule
from tinygrad.engine import realize
from tinygrad_nv import corrected, hooks
from tinygrad_nv.hooks import replaced
from tests.support.patterns import silu_mul
hooks.add_rewrite("silu_mul", silu_mul.rewrite)
hooks.add_custom_function("f", lambda ctx, call, ast: [], lambda call: ((), ()))
assert schedule.pre_schedule == [(hooks.rewritten, hooks.configuration)]
assert len(realize.pre_compile) == 1 and list(realize.custom_functions) == ["f"]
always = {"_select_device", "db_connection", "_recreate_cm", "_Device__get_canonicalized_item", "capturing",
          "free_intermediates", "get_worker_pool", "_prepare_jit_inputs", "__call__", "pickle",
          "pm_dtype_decomps"}
assert {attribute for _, attribute in replaced._replaced} == {
    *always, "scaled_dot_product_attention", "conv2d", "_compact_params", "__init__", *corrected.METHODS}
hooks.disable(); hooks.remove_custom_function("f")
assert {attribute for _, attribute in replaced._replaced} == always
assert (schedule.pre_schedule, realize.pre_compile, realize.custom_functions) == ([], [], {})
""")


def test_shared_memory_and_aux_reach_the_program_and_variables_its_launch(patched):
    run(patched, "-c", """
from tinygrad import dtypes
from tinygrad.uop.ops import KernelInfo, Ops, ProgramInfo, UOp
p = UOp.placeholder((4,), dtypes.float, 0)
n, p3 = UOp.variable("n", 1, 8, param=True), UOp.variable("p3", 1, 8, param=True)
sink = UOp.sink(p3, UOp.special(p3 * 2, "gidx0"), p.index(0).store(UOp.const(0, dtypes.float)),
                arg=KernelInfo("k", smem=1000, aux=(1, "x")))
info = ProgramInfo.from_sink(sink)
assert info.smem == 1000
body = (sink, UOp(Ops.LINEAR, src=(p, sink)), UOp(Ops.SOURCE, arg=""), UOp(Ops.BINARY, arg=b""))
elf = UOp(Ops.PROGRAM, src=body, arg=info).to_elf()
assert (elf.smem, elf.aux) == (1000, (1, "x"))
renamed = info.substitute({p3: n})
assert renamed.vars == (n,) and renamed.launch_dims({"n": 5})[0] == (10, 1, 1)
""")
