"""AdamW of many tensors in place (tile/optimizer/spec.py has the formula).

Protocol: parts have whole chunks; elements are independent of each other, so that no bit depends on parts.

    nothing where control[0] is 0
    each chunk of this part, whole vectors, then the last elements:
        read gradient, exp_avg, exp_avg_sq and parameter, or master weights; write them where they lay
"""
from __future__ import annotations

from typing import ClassVar

from tinygrad_nv.cpu.kernel import CPUKernel, c_type, kernel
from tinygrad_nv.cpu.optimizer.table import walk
from tinygrad_nv.cpu.schedule import CPUSchedule
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.optimizer.spec import CHUNK, HEAD, PER_GROUP, AdamWSpec

BYTES_OF_PART = 256 << 10   # waking a thread takes as long as moving some 10 KiB
PARTS = 4                   # for each thread, so that a thread that is late does fewer


class CPUAdamW(CPUSchedule):
    """Shares of chunks."""
    template: ClassVar[str] = "adamw_update"


def default(spec: AdamWSpec, target: CPU) -> CPUAdamW:
    """Some parts for each thread, where there is enough to do."""
    most = PARTS * target.threads if target.threads > 1 else 1
    chunks = sum(-(-count // CHUNK) for count in spec.counts)
    return CPUAdamW(target.isa, max(1, min(most, chunks, spec.nbytes // BYTES_OF_PART)))


def build(spec: AdamWSpec, s: CPUAdamW) -> CPUKernel:
    """The kernel: all x, m, v, masters; all gradients; control."""
    numbers = range(len(spec.counts))
    written = [(c_type(dtype), f"{name}{i}") for name, dtype in spec.kinds if name != "g" for i in numbers]
    read = [(c_type(spec.grad), f"g{i}") for i in numbers]
    kinds = [("const " * (name == "g") + c_type(dtype), name) for name, dtype in spec.kinds]
    groups = ", ".join(map(str, spec.groups))
    body = f"""    const float *own = control + {HEAD} + {PER_GROUP} * groups[t];
    const vf decay = (vf)own[0], step = (vf)own[1];
    s64 i = 0;
    for (; i + W <= n; i += W) {{ {_vector(spec, "")} }}
    if (i < n) {{ {_vector(spec, ", n - i")} }}"""
    loop = walk(spec.counts, s.parts, CHUNK, kinds, body)
    text = f"""
  if (control[0] == 0.f) return;
  static const int groups[] = {{{groups}}};
  const vf scale = (vf)control[1], root = (vf)control[2];{loop}"""
    return kernel("adamw", s.isa, text, written, [*read, ("float", "control")], parts=s.parts)


def _vector(spec: AdamWSpec, count: str) -> str:
    """C: the elements from i on."""
    load, store = ("load_n_", "store_n_") if count else ("load_", "store_")
    own, copy = ("w", f"{store}{short(spec.dtype)}(x + i, next{count});") if spec.master else ("x", "")
    return f"""const vf grad = {load}{short(spec.grad)}(g + i{count}) * scale;
      const vf before = {load}f32(m + i{count}), mean = fma_((vf){1 - spec.beta1!r}f, grad - before, before);
      const vf old = {load}f32(v + i{count}) * (vf){spec.beta2!r}f;
      const vf square = fma_(grad * grad, (vf){1 - spec.beta2!r}f, old);
      const vf change = mean / fma_(sqrt_(square), root, (vf){spec.eps!r}f);
      const vf next = fma_(-step, change, {load}f32({own} + i{count}) * decay);
      {store}f32(m + i, mean{count}); {store}f32(v + i, square{count});
      {store}f32({own} + i, next{count}); {copy}"""
