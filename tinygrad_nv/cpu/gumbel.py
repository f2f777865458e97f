"""Noise for draws, added to logits (tile/sampling.py): Threefry and two logarithms in vectors.

Protocol: tokens are shared out among parts in whole vectors. The arithmetic is that of tinygrad's kernels,
statement by statement, since the compiler contracts products and sums within one: the noise has the same
bits. Special cases of its logarithm are left out, as no argument is below 5e-8, above 17 or NaN.
"""
from __future__ import annotations

from tinygrad_nv.cpu.kernel import CPUKernel, kernel
from tinygrad_nv.cpu.machine import CPUMachine
from tinygrad_nv.cpu.schedule import CPUSchedule
from tinygrad_nv.tile.sampling import GumbelSpec

TEMPLATE = "gumbel"
OPERATIONS = 150            # an element: 20 rounds of Threefry, two logarithms
PART_ELEMENTS = 1 << 13     # fewer are done before another thread has begun
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def problems(spec: GumbelSpec, machine: CPUMachine) -> list[str]:
    """Why this template does not take noise; empty: it takes all."""
    return []


def default(spec: GumbelSpec, machine: CPUMachine) -> CPUSchedule:
    """The schedule."""
    return CPUSchedule(TEMPLATE, machine.isa, min(machine.threads, max(1, spec.size // PART_ELEMENTS)))


def build(spec: GumbelSpec, schedule: CPUSchedule) -> CPUKernel:
    """The kernel: out, logits, seed, position."""
    parts = schedule.parts
    body = f"""
  const u32 key[3] = {{seed[1], seed[0] ^ seed[1] ^ 0x1bd11bda, seed[0]}};
  const s64 vectors = ({spec.size} + W - 1) / W;
  const s64 first = core_id * vectors / {parts} * W, last = (core_id + 1) * vectors / {parts} * W;
  for (s64 i = first; i < last; i += W) {{
    vu a = (vu)((vi)(s32)i + iota_()) + key[2], b = (vu)((u32)*position + key[0]);
    {" ".join(_rounds(number) for number in range(5))}
    vf uniform = (__builtin_convertvector(a >> 9, vf) + 0.5f) * 0x1p-23f;
    const vf noise = minus_log(minus_log(uniform));
    store_n_f32(out + i, load_n_f32(logits + i, {spec.size} - i) + noise, {spec.size} - i);
  }}"""
    return kernel(f"gumbel_{spec.size}", schedule.isa, body, [("float", "out")],
                  [("float", "logits"), ("u32", "seed"), ("s32", "position")], parts=parts, before=_LOG)


def _rounds(number: int) -> str:
    """Four rounds, and the key after them."""
    mixed = [f"a = a + b; b = a ^ ((b << {r}) + (b >> {32 - r}));" for r in ROTATIONS[number % 2]]
    return " ".join([*mixed, f"a = a + key[{number % 3}]; b = b + (key[{(number + 1) % 3}] + {number + 1});"])


_LOG = """
INLINE vf minus_log(vf x) {
  vi small = x < 9.999999747378752e-05f;
  vf scaled = pick(small, x * 0x1p64f, x);
  vf thirds = scaled * 1.3333333730697632f;
  vi e = ((as_i(thirds) >> 23) & 255) - 127;
  vf m = as_f(as_i(scaled) - (e << 23));
  vf s = (m + -1.f) / (m + 1.f);
  vf t = s * s;
  vf whole = pick(small, to_f(e) + -64.f, to_f(e));
  vf y = ((((0.43745502829551697f * t + 0.5764790177345276f) * t) + 0.961801290512085f) * s * t) + whole
         + (s * 2.885390043258667f) + (s * 3.2734472910078694e-08f);
  return y * -0.6931471824645996f;
}"""
