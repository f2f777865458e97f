"""Expert parallel layers: each rank has some experts; tokens are sent to them, and results come back.

Protocol. Each of n ranks has its own tokens (T, H), the whole router, and E / n neighbouring experts
(`LocalExperts`). `dispatch(tokens, experts, group, policy)` is the output of a mixture of all E experts for
this rank's tokens, the same as `functional.dispatch` gives on one device:

1. `route` chooses k experts a token and sorts the T k slots by expert, so those of a rank are neighbours;
2. each rank sends to each other `capacity` rows, slots in that order, with their experts' numbers; rows that
   no slot fills are zeros of no expert, so no counts have to be known before;
3. the rows that arrive are sorted by expert and multiplied (`grouped_matmul`), but for rows of no expert;
4. results are sent back to the rank of their token, weighted and added up.

`capacity` None has room for every slot, min(k, E / n) T rows: nothing is dropped. A smaller one saves bytes
where slots are spread evenly; of the slots for one rank, ordered by expert and then by token, those beyond
the capacity are dropped: they add 0 to their tokens. Gradients of experts are of all ranks' tokens; those of
the router are of this rank's.

Source: GShard, arXiv 2006.16668, section 3.2, for capacities; DeepSpeed-MoE, arXiv 2201.05596.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad import Tensor, dtypes

from tinygrad_nv.dist.collectives.functions import all_to_all
from tinygrad_nv.dist.group import Group
from tinygrad_nv.errors import DistError
from tinygrad_nv.patterns.embedding import embedding, mask_unknown_rows
from tinygrad_nv.patterns.grouped_gemm.dispatch import policy_of
from tinygrad_nv.patterns.grouped_gemm.named import grouped_matmul
from tinygrad_nv.patterns.router.named import Routing, route
from tinygrad_nv.patterns.router.rows import group_rows
from tinygrad_nv.tile.router.spec import Policy


@dataclass(frozen=True)
class LocalExperts:
    """A router of E experts, and the E / n gated feed-forward networks of this rank (functional.Experts)."""
    router: Tensor      # (E, H)
    gate_up: Tensor     # (E / n, 2 I, H)
    down: Tensor        # (E / n, H, I)
    activation: str = "silu"


def dispatch(tokens: Tensor, experts: LocalExperts, group: Group, policy: Policy | str = "top2",
             capacity: int | None = None) -> Tensor:
    """Returns the sum of all ranks' experts for this rank's tokens (…, H). Raises `DistError`."""
    policy, count, local = policy_of(policy), int(experts.router.shape[0]), int(experts.down.shape[0])
    if local * group.size != count or int(experts.gate_up.shape[0]) != local:
        raise DistError(f"{local} experts on rank {group.rank} of {group.size}, of {count} of the router",
                        f"{count} / {group.size} on each", "give each rank its part of gate_up and down")
    x = tokens.reshape(-1, int(tokens.shape[-1]))
    routing = route((x @ experts.router.T).contiguous(), policy)
    if capacity is not None and capacity < 1:
        raise DistError(f"a capacity of {capacity} rows", "1 or more, or None for no limit",
                        "change capacity")
    room = capacity or int(x.shape[0]) * min(policy.k, local)
    slots, numbers = _rows_to_send(routing, group, local, room)
    # the lookup gives zeros for a number of no row, and no gradient
    rows = embedding(x, (slots < int(routing.order.shape[0])).where(slots // policy.k, int(x.shape[0])))
    came = all_to_all(rows.reshape(group.size * room, -1).contiguous(), group, name="tokens to experts")
    made = _compute(came, all_to_all(numbers, group, name="numbers of experts"), experts)
    back = all_to_all(made, group, name="results of experts")
    place = _places(routing, local, room, group.size)
    parts = embedding(back, place).reshape(int(x.shape[0]), policy.k, -1)
    return (parts * routing.weights.unsqueeze(-1).cast(parts.dtype)).sum(1).reshape(tokens.shape)


def _rows_to_send(routing: Routing, group: Group, local: int, room: int) -> tuple[Tensor, Tensor]:
    """Returns, of each row that is sent, (n · room,) int32: its slot, or the number of slots for none; and
    its expert on the rank that gets it, or `local` for none."""
    count = int(routing.order.shape[0])
    bounds = routing.offsets[::local].contiguous()                                      # (n + 1)
    at = bounds[:-1].unsqueeze(1) + Tensor.arange(room, dtype=dtypes.int32).unsqueeze(0)
    filled = (at < bounds[1:].unsqueeze(1)).reshape(-1)
    chosen = at.reshape(-1).minimum(count - 1)
    slots = filled.where(routing.order[chosen], count).cast(dtypes.int32).contiguous()
    experts = routing.experts.reshape(-1)[slots.minimum(count - 1)] % local
    return slots, filled.where(experts, local).cast(dtypes.int32).contiguous()


def _compute(rows: Tensor, numbers: Tensor, experts: LocalExperts) -> Tensor:
    """Computes this rank's experts for rows that came; zeros for those of none."""
    local = int(experts.down.shape[0])
    order, offsets = group_rows(numbers, local)
    inner = grouped_matmul(rows, experts.gate_up, offsets, order, gather=1, activation=experts.activation,
                           partial=True)
    made = grouped_matmul(inner, experts.down, offsets, order, scatter=True, partial=True)
    return mask_unknown_rows(made, numbers < local)


def _places(routing: Routing, local: int, room: int, ranks: int) -> Tensor:
    """The row, of all that come back, with the result of each slot; their number for one that was dropped."""
    experts = routing.experts.reshape(-1)
    own = experts.unsqueeze(1) == Tensor.arange(int(routing.offsets.shape[0]) - 1, dtype=dtypes.int32)
    # slots of one expert are in rising order
    before = ((own.cast(dtypes.int32).cumsum(0) - 1) * own).sum(1)
    rank = experts // local
    at = routing.offsets[experts] + before - routing.offsets[rank * local]
    return (at < room).where(rank * room + at, ranks * room).cast(dtypes.int32).contiguous()
