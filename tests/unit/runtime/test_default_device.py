"""Which device a program uses that names none. Each in a process of its own: tinygrad chooses once."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import with_root
from tinygrad_nv.hooks import devices

FAKE = """
import os
from tests.support.runtime.cuda_fake import installed
from tinygrad_nv import Device, Tensor, hooks
from tinygrad_nv.runtime.cuda import device as cuda_device
"""


def run(script: str, **env: str) -> str:
    """What a script prints on a machine that names no device."""
    kept = {name: value for name, value in with_root().items() if name not in ("DEV", "NV")}
    done = subprocess.run([sys.executable, "-c", script], env={**kept, **env}, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("nv", ["0", "1"])
def test_the_switch_of_this_package_is_no_device(nv: str):
    assert run("from tinygrad_nv import Device; print(Device.DEFAULT)", NV=nv) == "CPU"


def test_a_device_by_another_old_name_is_still_refused():
    code = "from tinygrad_nv import Device\ntry: Device.DEFAULT\nexcept AssertionError as error: print(error)"
    assert run(code, METAL="1") == "METAL=1 is deprecated, use DEV=METAL instead"


def test_a_gpu_comes_before_tinygrads_own_choice():
    assert run(FAKE + """
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
    assert run(f"""{FAKE}
cuda_device.has_library = lambda: True
fake = installed()
{why}
with fake: print(Device.DEFAULT)
""") == "CPU"


@pytest.mark.slow
def test_a_gpu_that_does_not_open_is_left_alone():
    assert run(FAKE + """
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
