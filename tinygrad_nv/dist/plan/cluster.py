"""GPUs, and how they are connected: figures.toml, each figure with its source.

Protocol: `cluster("8xH100", nodes=2, net="400G")` is 2 nodes of 8 GPUs. Names are not case-sensitive; a GPU,
or a rate of the network, that there are no figures of raises `PlanError` by name. `Device.with_power(watts)`
is the device at a lower power limit: clocks that power leaves are those of ptx/timing.
"""
from __future__ import annotations

import functools
import re
import tomllib
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from tinygrad_nv.errors import PlanError
from tinygrad_nv.ptx.timing.gpu import clock_under_load
from tinygrad_nv.ptx.timing.gpu import figures as timing_figures
from tinygrad_nv.tile.gpu import GPU_MODELS, GPUModel

PER_NODE = 8                    # GPUs of a node, where no number is said
NET = "400G"
SPELLED = {"h100-sxm": "h100", "h100sxm": "h100", "h100pcie": "h100-pcie", "h200-sxm": "h200",
           "a100-sxm": "a100", "a100-80gb": "a100", "a100-sxm-80gb": "a100"}
RATE = re.compile(r"(\d+)(?:g|gb/s|gbps|gbit)?", re.I)


@dataclass(frozen=True)
class Link:
    """Connects the GPUs of a node. Rates are of one direction of one GPU; `hop_s` and `tree_hop_s` are of a
    step of a ring or tree, by NCCL's protocols LL, LL128, Simple. `multicast`: its switches reduce (NVLS);
    `peer`: kernels read other GPUs' memory."""
    name: str
    bytes_per_s: float
    multicast: bool
    peer: bool
    hop_s: tuple[float, float, float]
    tree_hop_s: tuple[float, float, float]
    low_latency_bytes_per_s: float


@dataclass(frozen=True)
class Net:
    """Connects nodes: an adapter of `bytes_per_s` for each GPU."""
    name: str
    bytes_per_s: float
    hop_s: tuple[float, float, float]
    tree_hop_s: tuple[float, float, float]
    post_s: float


@dataclass(frozen=True)
class Device:
    """A GPU. `timing`: its name in ptx/timing/gpus, "" for none."""
    name: str
    model: GPUModel
    memory_bytes: int
    link: Link
    fp8: bool
    timing: str = ""

    @property
    def peak_flops_per_s(self) -> float:
        """bf16, dense."""
        return self.model.tensor_flops_per_s

    def with_power(self, watts: float) -> Device:
        """The same at a lower power limit, with the clock that is left where tensor cores are busy."""
        if not self.timing: raise PlanError(f"--power of a {self.name}", "a GPU with figures of its power",
                                            "leave --power out")
        known = timing_figures(self.timing)
        if not known.static_w < watts <= known.power_w:
            raise PlanError(f"--power {watts:g} of a {self.name}",
                            f"more than {known.static_w:g} W, at most {known.power_w:g} W")
        limited, full = (clock_under_load(replace(known, power_w=limit), 1.0, 0.0, 0.0)
                         for limit in (watts, known.power_w))
        hz = self.model.clock_hz * limited / full
        return replace(self, model=replace(self.model, clock_hz=hz), name=f"{self.name} at {watts:g} W")


@dataclass(frozen=True)
class Cluster:
    """`nodes` of `per_node` GPUs each."""
    device: Device
    per_node: int
    nodes: int
    net: Net

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.per_node * self.nodes

    def __str__(self) -> str:
        here = f"{self.per_node} x {self.device.name} ({self.device.link.name})"
        return here if self.nodes == 1 else f"{self.nodes} nodes of {here}, {self.net.name} a GPU"


@functools.cache
def figures() -> dict[str, Any]:
    """All of figures.toml."""
    return tomllib.loads((resources.files("tinygrad_nv.dist.plan") / "figures.toml").read_text())


def gpu_names() -> tuple[str, ...]:
    """Names of GPUs."""
    return tuple(figures()["gpus"])


@functools.cache
def device(name: str) -> Device:
    """A GPU by its name. Raises `PlanError` for one without figures."""
    key = name.lower().replace("_", "-").replace(" ", "-")
    key = SPELLED.get(key, key)
    if (found := figures()["gpus"].get(key)) is None:
        raise PlanError(f"no figures of a GPU {name!r}", f"one of {', '.join(gpu_names())}",
                        "name one of these, or add it to tinygrad_nv/dist/plan/figures.toml")
    model = next(each for each in GPU_MODELS if each.name == found["model"])
    model = replace(model, name=found["name"],
                    hbm_bytes_per_s=found.get("hbm_bytes_per_s", model.hbm_bytes_per_s))
    return Device(found["name"], model, found["memory_bytes"], _link(found["link"]), found["fp8"],
                  found.get("timing", ""))


def _link(name: str) -> Link:
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value
                             for key, value in figures()["links"][name].items()}
    return Link(**given)


def net_of(rate: str) -> Net:
    """A network by the rate of an adapter, such as 400G. Raises `PlanError`."""
    match = RATE.fullmatch(rate.strip())
    if match is None or not 1 <= int(match[1]) <= 3200:
        raise PlanError(f"--net {rate}", "the rate of a GPU's adapter, such as 400G (NDR) or 200G (HDR)",
                        "--net 400G")
    given = figures()["net"]
    return Net(f"{int(match[1])} Gb/s", int(match[1]) / 8 * 1e9 * given["share"], tuple(given["hop_s"]),
               tuple(given["tree_hop_s"]), given["post_s"])


def cluster(gpus: str, nodes: int = 1, net: str = NET) -> Cluster:
    """`8xH100`: eight of a node; `H100` is one, `16xH100` without --nodes two nodes of eight. Raises
    `PlanError`."""
    count, _, name = gpus.partition("x") if re.match(r"\d+x", gpus) else ("1", "x", gpus)
    number = int(count)
    if not name or number < 1:
        raise PlanError(f"--gpus {gpus}", "a number and a GPU, such as 8xH100", "--gpus 8xH100")
    if nodes < 1: raise PlanError(f"--nodes {nodes}", "1 or more")
    if nodes > 1 or number <= PER_NODE: return Cluster(device(name), number, nodes, net_of(net))
    if number % PER_NODE:
        raise PlanError(f"--gpus {gpus}: {number} GPUs are not whole nodes of {PER_NODE}",
                        f"at most {PER_NODE}, or a multiple of {PER_NODE}",
                        "say how many a node has, and --nodes")
    return Cluster(device(name), PER_NODE, number // PER_NODE, net_of(net))
