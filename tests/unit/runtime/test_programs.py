"""Programs are made once for all processes, and made again when anything they depend on changes. Which
device a program uses that names none. Each in a process of its own: tinygrad chooses once."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import with_root
from tinygrad_nv.hooks import devices

SCRIPT = """
import tinygrad_nv
from tinygrad import Tensor
from tinygrad.engine import realize
made = []
own = realize.to_program
def counted(*args): made.append(args[0]); return own(*args)
realize.to_program = counted
print((Tensor([1.0, 2, 3], device="CPU") * 3).tolist(), end=" ")
product = Tensor.ones(33, 7, device="CPU").contiguous() @ Tensor.ones(7, 5, device="CPU").contiguous()
print(product.sum().item(), len(made))
from tinygrad_nv.runtime.programs import programs_compiled, programs_known
assert programs_known() > 0 and (programs_compiled() > 0) == (len(made) > 0), (programs_compiled(), len(made))
"""


@pytest.fixture
def run(tmp_path: Path):
    """Runs the script with a disk cache of its own; returns its answer and how many programs it made."""
    def once(**environment: str) -> tuple[str, int]:
        own = {"CACHEDB": str(tmp_path / "cache.db"), "PARALLEL": "0", "DEV": "CPU"}
        done = subprocess.run([sys.executable, "-c", SCRIPT], env={**os.environ, **own, **environment},
                              capture_output=True, text=True, check=True)
        answer, _, made = done.stdout.strip().rpartition(" ")
        return answer, int(made)
    return once


def test_a_second_process_makes_no_program(run):
    first, second = run(), run()
    assert first[0] == second[0] == "[3.0, 6.0, 9.0] 1155.0"
    assert first[1] > 0
    assert second[1] == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("change", [{"NOOPT": "1"}, {"NV_PROGRAM_CACHE": "0"}, {"CCACHE": "0"}, {"NV": "0"}],
                         ids=lambda c: "-".join(c))
def test_what_changes_programs_or_forbids_the_cache_makes_them_anew(run, change):
    assert run()[1] > 0
    answer, made = run(**change)
    assert answer == "[3.0, 6.0, 9.0] 1155.0"
    assert made > 0


@pytest.mark.slow
def test_another_compiler_makes_programs_anew(run, tmp_path: Path):
    assert run()[1] > 0
    wrapper = tmp_path / "other-cc"
    wrapper.write_text(f"#!{sys.executable}\nimport sys\nfrom tinygrad_nv.toolchain import main\n"
                       "sys.exit(main())\n")
    wrapper.chmod(0o755)
    assert run(CC=str(wrapper))[1] > 0
    assert run(CC=str(wrapper))[1] == 0


GIVEN = """
import numpy as np
from tinygrad_nv import Tensor
from tinygrad.engine import realize
asked = []
own = realize.get_worker_pool
def pool(): asked.append(1); return own()
realize.get_worker_pool = pool
a = Tensor(np.arange(64, dtype=np.float32).reshape(8, 8) % 5, device="CPU").realize()
b, c = a[:1] @ a.T, a[1:3] @ a.T
Tensor.realize(b, c)
print(b.numpy().sum() + c.numpy().sum(), len(asked))
"""


@pytest.mark.slow
def test_kernels_of_ours_start_no_workers_once_they_are_compiled(tmp_path: Path):
    """Two kernels given as text; tinygrad would ask its workers for any two it does not know."""
    answers = []
    for _ in range(2):
        own = {"CACHEDB": str(tmp_path / "cache.db"), "PARALLEL": "0", "DEV": "CPU"}
        done = subprocess.run([sys.executable, "-c", GIVEN], env={**os.environ, **own}, capture_output=True,
                              text=True, check=True)
        answers.append(done.stdout.split())
    assert answers[0][0] == answers[1][0]
    assert [asked for _, asked in answers] == ["1", "0"]


THREAD = """
import threading
import tinygrad_nv
from tinygrad import Tensor
(Tensor.ones(3, device="CPU").contiguous() + 1).realize()
def work(): print((Tensor.ones(7, device="CPU").contiguous() * 3).sum().item())
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@pytest.mark.slow
def test_a_thread_that_the_disk_cache_does_not_serve_compiles(tmp_path: Path):
    """SQLite serves the thread that opened it alone; tinygrad's workers compile for others."""
    own = {"CACHEDB": str(tmp_path / "cache.db"), "PARALLEL": "1", "DEV": "CPU"}
    done = subprocess.run([sys.executable, "-c", THREAD], env={**os.environ, **own}, capture_output=True,
                          text=True, check=True)
    assert done.stdout.split() == ["21.0"], done.stderr


SHOWN = """
import tinygrad_nv
from tinygrad import Tensor, helpers
from tinygrad.uop import ops
(Tensor([1.0, 2, 3], device="CPU") * 3).realize()
names = [helpers.ansistrip(key.display_name) for key in ops.tracked_keys]
print("traced:", [name for name in names if name.startswith("E_")])
"""


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", [{"DEBUG": "4"}, {"VIZ": "-1"}], ids=lambda how: "-".join(how))
def test_what_DEBUG_and_VIZ_show_is_shown_in_every_process(tmp_path: Path, how: dict[str, str]):
    """Sources, and the steps that VIZ links a kernel to, exist while a program is made."""
    shown = []
    for _ in range(2):
        own = {"CACHEDB": str(tmp_path / "cache.db"), "PARALLEL": "0", "DEV": "CPU", **how}
        done = subprocess.run([sys.executable, "-c", SHOWN], env={**os.environ, **own}, capture_output=True,
                              text=True, check=True)
        lines = done.stdout.splitlines()
        shown.append([line for line in lines if line.startswith(("void E_", "traced:"))])
    assert shown[0] == shown[1]
    assert "E_3" in shown[0][0], shown


FAKE = """
import os
from tests.support.runtime.cuda_fake import installed
from tinygrad_nv import Device, Tensor, hooks
from tinygrad_nv.runtime.cuda import device as cuda_device
"""


def printed(script: str, **env: str) -> str:
    """What a script prints on a machine that names no device."""
    kept = {name: value for name, value in with_root().items() if name not in ("DEV", "NV")}
    done = subprocess.run([sys.executable, "-c", script], env={**kept, **env}, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("nv", ["0", "1"])
def test_the_switch_of_this_package_is_no_device(nv: str):
    assert printed("from tinygrad_nv import Device; print(Device.DEFAULT)", NV=nv) == "CPU"


def test_a_device_by_another_old_name_is_still_refused():
    code = "from tinygrad_nv import Device\ntry: Device.DEFAULT\nexcept AssertionError as error: print(error)"
    assert printed(code, METAL="1") == "METAL=1 is deprecated, use DEV=METAL instead"


def test_a_gpu_comes_before_tinygrads_own_choice():
    assert printed(FAKE + """
cuda_device.has_library = lambda: True
with installed(version=(99, 0)) as fake:
    x = Tensor([1.0, 2.0]) * 3
    print(x.tolist(), x.device, os.environ["DEV"])
    hooks.remove_device("CUDA")
""") == "[3.0, 6.0] CUDA CUDA"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("why", ["cuda_device.has_bindings = lambda: False",
                                 "fake = installed(gpus=0)", "fake = installed(version=(11, 0))"])
def test_without_what_it_needs_tinygrad_chooses(why: str):
    assert printed(f"""{FAKE}
cuda_device.has_library = lambda: True
fake = installed()
{why}
with fake: print(Device.DEFAULT)
""") == "CPU"


@pytest.mark.slow
def test_a_gpu_that_does_not_open_is_left_alone():
    assert printed(FAKE + """
cuda_device.has_library = lambda: True
with installed() as fake:
    fake.fail("cuDevicePrimaryCtxRetain", "CUDA_ERROR_DEVICE_UNAVAILABLE", times=9)
    print(Device.DEFAULT)
""") == "CPU"


@pytest.mark.parametrize(("file", "text", "device"), [
    ("dev/nvidia0", "", "NV"), ("sys/bus/pci/devices/0/vendor", "0x10de\n", "NV"), ("dev/dxg", "", "CUDA"),
    ("dev/nvidiactl", "", "CUDA"), ("dev/kfd", "", "AMD"),
    ("sys/bus/pci/devices/0/vendor", "0x1002\n", "AMD"),
    ("sys/bus/usb/devices/0/idVendor", "add1\n", "AMD"), ("dev/kgsl-3d0", "", "QCOM")])
def test_drivers_of_gpus_that_linux_does_not_list_are_not_loaded(tmp_path: Path, file: str, text: str,
                                                                 device: str):
    assert devices._absent(device, tmp_path)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("0x8086\n" if text else text)
    if text: assert devices._absent(device, tmp_path), "another vendor's"
    (tmp_path / file).write_text(text)
    assert not devices._absent(device, tmp_path)
    assert not devices._absent("CPU", tmp_path)
