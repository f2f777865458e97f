"""The template of routers on a GPU."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tinygrad_nv.tile.gpu import gpu_model_for
from tinygrad_nv.tile.order import BY_ROW
from tinygrad_nv.tile.router import plan
from tinygrad_nv.tile.router.spec import RouterSpec
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU, Family, Template, lazy_build


@dataclass(frozen=True)
class Router(Schedule):
    """Nothing to choose."""
    template: ClassVar[str] = "router"


def sms(gpu: GPU) -> int:
    """Multiprocessors of a target."""
    return gpu.sm_count or gpu_model_for(gpu.arch).sm_count


def _problems(spec: RouterSpec, schedule: Router, gpu: GPU) -> Sequence[str]:
    return plan.problems(spec, sms(gpu))


ROUTER = Template("router", RouterSpec, Router, _problems, lambda spec, gpu: (Router(),),
                  lazy_build("tinygrad_nv.tile.router.kernel", "router"))
FAMILY = Family("router", (ROUTER,), determinism_class=BY_ROW)
