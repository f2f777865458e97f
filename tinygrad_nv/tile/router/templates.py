"""The template of routers on a GPU, and its plan: threads, tokens of a CTA, shared memory."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from tinygrad_nv.tile.gpu import gpu_model_for
from tinygrad_nv.tile.order import BY_ROW
from tinygrad_nv.tile.router.spec import RouterSpec
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU, Family, Template, lazy_build

MOST_EXPERTS = 512      # 16 of a lane, keys and scores of each in registers
MOST_K = 32             # a lane has a choice
MOST_GROUPS = 32        # a bit of a ballot each
MOST_SLOTS = 8192       # of a CTA, that wait in shared memory
WARPS = 16              # of a CTA where there are several
ALONE = 32              # tokens that one CTA routes and orders: with 64 two launches take less time
EXPERT_BITS = 10        # of a slot in shared memory; the rest is its rank


@dataclass(frozen=True)
class Router(Schedule):
    """Nothing to choose."""
    template: ClassVar[str] = "router"


def sms(gpu: GPU) -> int:
    """Multiprocessors of a target."""
    return gpu.sm_count or gpu_model_for(gpu.arch).sm_count


def _problems(spec: RouterSpec, schedule: Router, gpu: GPU) -> Sequence[str]:
    return problems(spec, sms(gpu))


ROUTER = Template("router", RouterSpec, Router, _problems, lambda spec, gpu: (Router(),),
                  lazy_build("tinygrad_nv.tile.router.kernel", "router"))
FAMILY = Family("router", (ROUTER,), determinism_class=BY_ROW)


@dataclass(frozen=True)
class RouterPlan:
    """A router on `sms` multiprocessors. Warps have `per_warp` tokens in a row, CTAs `per_cta`."""
    spec: RouterSpec
    sms: int

    @staticmethod
    @lru_cache(256)
    def of(spec: RouterSpec, sms: int) -> RouterPlan:
        """The plan."""
        return RouterPlan(spec, sms)

    @property
    def lanes(self) -> int:
        """Experts of a lane."""
        return -(-self.spec.experts // 32)

    @property
    def alone(self) -> bool:
        """Whether one CTA does all."""
        return self.spec.tokens <= ALONE

    @property
    def warps(self) -> int:
        """Warps of a CTA: a thread has an expert where they are counted."""
        if not self.alone: return max(WARPS, self.lanes)
        most = 32 if self.lanes <= 8 else 16    # of which each has the registers for its keys and scores
        return max(min(self.spec.tokens, most), self.lanes)

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def per_cta(self) -> int:
        return self.per_warp * self.warps

    @property
    def per_warp(self) -> int:
        most = 1 if self.alone else self.sms
        return -(-self.spec.tokens // (self.warps * most))

    @property
    def ctas(self) -> int:
        return -(-self.spec.tokens // self.per_cta)

    @property
    def slots(self) -> int:
        """Most slots of a CTA."""
        return self.per_cta * self.spec.policy.k

    @property
    def workspace_words(self) -> int:
        """u32: counts of each CTA's experts, and a rank for each slot; none where one CTA does all."""
        return 0 if self.alone else self.ctas * self.spec.experts + self.spec.slots


def problems(spec: RouterSpec, sms: int) -> list[str]:
    """Why a router has no kernel; empty when it has one."""
    out, policy = [], spec.policy
    if spec.experts > MOST_EXPERTS: out.append(f"{spec.experts} experts, at most {MOST_EXPERTS}")
    if policy.k > MOST_K: out.append(f"{policy.k} experts of a token, at most {MOST_K}")
    if policy.groups > MOST_GROUPS: out.append(f"{policy.groups} groups, at most {MOST_GROUPS}")
    if not out and (slots := RouterPlan.of(spec, sms).slots) > MOST_SLOTS:
        out.append(f"{slots} slots of a CTA, at most {MOST_SLOTS}")
    return out
