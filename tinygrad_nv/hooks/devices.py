"""Devices of tinygrad by name, the default device, and the CPU device. Part of
__init__.py, which states the protocol.
"""
from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tinygrad import codegen
from tinygrad.device import ALL_DEVICES, Device, MultiBuffer, TinyELF
from tinygrad.engine import jit, realize
from tinygrad.helpers import Context
from tinygrad.uop.ops import PatternMatcher, UOp, buffers

from tinygrad_nv import config
from tinygrad_nv.errors import HookError, NVError
from tinygrad_nv.hooks.replaced import add, check_version, official, put_back, remove, replace, theirs

_devices: dict[str, types.ModuleType | None] = {}  # the module that was there before, if any
_preferred: dict[str, Callable[[], bool]] = {}  # devices that come first where this holds


def add_device(name: str, cls: type, preferred: Callable[[], bool] | None = None) -> None:
    """Makes `Device[name]` open `cls(name)`, in place of tinygrad's device of that name if it has one. Where
    `preferred()` holds and it opens, programs that name no device use it."""
    name = name.upper()
    if any(opened.split(":")[0] == name for opened in Device._opened_devices):
        raise HookError(f"device {name} is open already", "registration before the first use",
                        "import tinygrad_nv before anything runs on that device")
    module = types.ModuleType(_module_name(name))
    setattr(module, f"{name}Device", cls)
    add(_devices, "device", name, sys.modules.get(module.__name__))
    if preferred is not None: _preferred[name] = preferred
    if official(): Device.register(name, cls)
    else:
        sys.modules[module.__name__] = module
        replace(UOp, "to_elf", _with_aux(theirs(UOp, "to_elf")))
    type(Device).get_class.cache_clear()
    free = theirs(jit.CapturedJit, "free_intermediates")
    replace(jit.CapturedJit, "free_intermediates", _freeing_views(free))


def remove_device(name: str) -> None:
    """Undoes `add_device`. What was opened under the name is finalized; its buffers are of no use then."""
    before = remove(_devices, "device", name := name.upper())
    _preferred.pop(name, None)
    if not _devices:
        put_back(jit.CapturedJit, "free_intermediates")
        put_back(UOp, "to_elf")
    _close(name)
    if official(): Device.register(name, None)
    elif before is not None: sys.modules[_module_name(name)] = before
    else: del sys.modules[_module_name(name)]
    type(Device).get_class.cache_clear()


def _freeing_views(free: Callable[[jit.CapturedJit[Any]], None]) -> Callable[[jit.CapturedJit[Any]], None]:
    """tinygrad's free_intermediates, and then the views of what it freed. It leaves them with the old
    address, which mostly goes well on its own devices, as they keep freed memory and hand it out again; ours
    give it back, and the next replay would write there."""
    def free_intermediates(self: jit.CapturedJit[Any]) -> None:
        free(self)
        for held in list(buffers.values()):
            for view in held.bufs if isinstance(held, MultiBuffer) else (held,):
                if view._base is None or view.device not in view._bufs or view._base.is_allocated(): continue
                view.deallocate()
    return free_intermediates


def _with_aux(to_elf: Callable[[UOp], TinyELF]) -> Callable[[UOp], TinyELF]:
    """tinygrad's to_elf, whose TinyELF gets the `aux` of the kernel's KernelInfo, if it has one, as with
    upstream.patch: what a device's program must know of its launches besides their extents."""
    def with_aux(self: UOp) -> TinyELF:
        made: Any = to_elf(self)
        made.aux = getattr(self.src[0].arg, "aux", None)
        return made
    return with_aux


def install_decomposition(rules: PatternMatcher) -> None:
    """Has `rules` go before tinygrad's for dtypes that a renderer lacks, in each kernel: their `ctx` is the
    set of dtypes that were found, and the renderer."""
    replace(codegen, "pm_dtype_decomps", rules + theirs(codegen, "pm_dtype_decomps"))


def _module_name(device: str) -> str: return f"tinygrad.runtime.ops_{device.lower()}"


def _close(name: str) -> None:
    """Forgets the opened devices of a name. Their cache drops all or none, so the others fill it again."""
    for ix in [ix for ix in Device._opened_devices if ix.split(":")[0] == name]: Device[ix].finalize()
    opened = {ix: Device[ix] for ix in Device._opened_devices if ix.split(":")[0] != name}
    type(Device)._Device__get_canonicalized_item.cache_clear()
    Device._opened_devices.clear()
    # while the cache fills, "opening" a device means handing out the one that is open
    Device.get_class = lambda ix: opened.__getitem__
    try:
        with Context(DEBUG=0):
            for ix in opened: Device[ix]
    finally: del Device.get_class
    for key in [key for key in realize.runtime_cache if key[1].split(":")[0] == name]:
        del realize.runtime_cache[key]


# **** the default device ****

def _prefer_ours(theirs: functools.cached_property[str]) -> functools.cached_property[str]:
    """tinygrad's choice of a device, the first of its own that opens, after the preferred ones. It hides why
    each does not open: with none left, the CPU says why. And NV=1 is a switch of ours; tinygrad would refuse
    it as an old way to ask for its NV device."""
    def _select_device(device: Any) -> str:
        if (name := _first_preferred()) is not None:
            os.environ["DEV"] = name  # as tinygrad does, for the processes it starts
            return name
        names = [name for name in device._devices if name != "NV"]
        asked = SimpleNamespace(_devices=names, get_available_devices=functools.partial(_opening, device))
        try: return theirs.func(asked)
        except RuntimeError as error:
            if isinstance(error.__cause__, StopIteration): device["CPU"]
            raise

    ours = functools.cached_property(_select_device)
    ours.__set_name__(type(Device), "_select_device")
    return ours


def _opening(device: Any) -> Iterator[str]:
    """tinygrad's devices that open, in its order. Its drivers of GPUs take up to half a second to load, which
    is saved where Linux lists no such GPU."""
    for name in ALL_DEVICES:
        if sys.platform == "linux" and _absent(name): continue
        with contextlib.suppress(Exception): yield device[name].device


def _absent(name: str, root: Path = Path("/")) -> bool:
    """Whether Linux lists nothing that the device could be. (CUDA serves below WSL, too: /dev/dxg.)"""
    def present(*patterns: str) -> bool: return any(any(root.glob(each)) for each in patterns)

    def is_listed(bus: str, file: str, *vendors: str) -> bool:
        return any(_line(each) in vendors for each in root.glob(f"sys/bus/{bus}/devices/*/{file}"))
    match name:
        case "NV": return not present("dev/nvidia*") and not is_listed("pci", "vendor", "0x10de")
        case "CUDA": return _absent("NV", root) and not present("dev/dxg")
        case "AMD": return not present("dev/kfd") and not is_listed("pci", "vendor", "0x1002") \
            and not is_listed("usb", "idVendor", "add1", "3801")
        case "QCOM": return not present("dev/kgsl-3d0")
    return False


def _line(file: Path) -> str:
    try: return file.read_text().strip()
    except OSError: return ""


def _first_preferred() -> str | None:
    for name, holds in _preferred.items():
        if not holds(): continue
        try: return str(Device[name].device)
        except NVError: continue  # such as a GPU that another process has to itself
    return None


# **** the CPU device ****

OPS_CPU = "tinygrad.runtime.ops_cpu"
Enabled = Callable[[], bool]
_ours_of_cpu: dict[str, Callable[[Any, Enabled], Any]] = {}


def install_cpu(ours: Mapping[str, Callable[[Any, Enabled], Any]], graph: Callable[[], type],
                enabled: Enabled) -> None:
    """Installs the CPU, for hooks.install_cpu; graphs while `enabled()`."""
    check_version()
    _ours_of_cpu.update(ours)
    wait_for_cpu(functools.partial(_join_cpu, graph, enabled))
    replace(type(Device), "_select_device", _prefer_ours(theirs(type(Device), "_select_device")))


def remove_cpu() -> None:
    """Undoes `install_cpu`. An open CPU device keeps the compiler, allocator and programs it has."""
    if (ops_cpu := stop_waiting()) is not None:
        for name in _ours_of_cpu: put_back(ops_cpu, name)
        if "graph" in vars(ops_cpu.CPUDevice): del ops_cpu.CPUDevice.graph
    put_back(type(Device), "_select_device")


def _join_cpu(graph: Callable[[], type], enabled: Enabled, ops_cpu: Any) -> None:
    for name, made in _ours_of_cpu.items(): replace(ops_cpu, name, made(theirs(ops_cpu, name), enabled))
    ops_cpu.CPUDevice.graph = _CPUGraph(graph, enabled)


class _CPUGraph:
    """CPUDevice.graph, which tinygrad sets to None on each device: ours while enabled."""

    def __init__(self, graph: Callable[[], type], enabled: Enabled) -> None:
        self.graph, self.enabled = graph, enabled

    def __get__(self, device: Any, owner: type | None = None) -> Any:
        if device is None: return self
        if not self.enabled() or not config.get("NV_CPU_GRAPH") or sys.platform != "linux":
            return vars(device).get("graph")
        return self.graph()

    def __set__(self, device: Any, value: Any) -> None: vars(device)["graph"] = value


class _CPUFinder(importlib.abc.MetaPathFinder):
    """Finds tinygrad's CPU device as it is found without, and does something with the module once loaded.

    Importing the device beforehand would double the time that importing tinygrad takes.
    """

    def __init__(self, then: Callable[[types.ModuleType], None]) -> None: self.then = then

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != OPS_CPU: return None
        stop_waiting()
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            with _load_on_call(): load(module)
            self.then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


# renderers that the CPU device names, and that only DEV=CPU:LVP and DEV=CPU:X86 use: 0.1 s of a start
SELDOM = {"tinygrad.renderer.nir": "LVPRenderer", "tinygrad.renderer.isa.x86": "X86Renderer"}


@contextlib.contextmanager
def _load_on_call() -> Iterator[None]:
    """Inside, the modules of `SELDOM` have a class that loads the module when it is called."""
    made = {name: types.ModuleType(name) for name in SELDOM if name not in sys.modules}
    for name, module in made.items(): setattr(module, SELDOM[name], _later(name, SELDOM[name]))
    sys.modules.update(made)
    try: yield
    finally:
        for name in made: del sys.modules[name]


def _later(module: str, name: str) -> type:
    def load(cls: type, *arguments: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*arguments)
    return type(name, (), {"__new__": load, "__module__": module})


def wait_for_cpu(then: Callable[[types.ModuleType], None]) -> None:
    """Calls `then` with tinygrad's CPU module: now if it is imported, else when it is."""
    if OPS_CPU in sys.modules: then(sys.modules[OPS_CPU])
    else: sys.meta_path.insert(0, _CPUFinder(then))


def stop_waiting() -> types.ModuleType | None:
    """Takes `wait_for_cpu` back if the module is not imported yet, and returns it if it is."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _CPUFinder)]
    return sys.modules.get(OPS_CPU)
