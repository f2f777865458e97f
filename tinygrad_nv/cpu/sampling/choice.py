"""Choices of tokens (tile/sampling/spec.py): Threefry and two logarithms in vectors, and the largest with
them.

Protocol: a pair of tokens has one call of Threefry, so two vectors of tokens have a vector of calls. Rows are
cut into equal pieces, if there are fewer of them than parts, and pieces are shared out among parts. Each lane
keeps its largest number and where it was first; then the best of lanes, and, in a second kernel, the best of
pieces are found. Comparisons are exact, so neither pieces nor parts matter.

The noise has the arithmetic of tinygrad's kernels, statement by statement, since the compiler contracts
products and sums within one: it has the same bits. Special cases of its logarithm are left out, as no
argument is below 5e-8, above 17 or NaN. Where all of a vector is -inf, as after a filter, there is none.

Counts of chosen tokens are updated in place, by one part: each row adds to one number.
"""
from __future__ import annotations

from typing import ClassVar

from tinygrad.dtype import dtypes

from tinygrad_nv.cpu.kernel import CPUKernel, kernel
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.cpu.template import CPUSchedule
from tinygrad_nv.tile.kernel import Chain, Scratch
from tinygrad_nv.tile.sampling.spec import NUMBERS, ChoiceSpec, CountSpec, Number

PART_ELEMENTS = 1 << 13     # fewer are done before another thread has begun
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_C_TYPE = {dtypes.int32: "s32", dtypes.uint64: "u64"}


class CPUChoice(CPUSchedule):
    """Shares of rows, or of pieces of them."""
    template: ClassVar[str] = "choice"


def default(spec: ChoiceSpec, target: CPU) -> CPUChoice:
    """The schedule."""
    enough = max(1, spec.rows * spec.size // PART_ELEMENTS)
    return CPUChoice(target.isa, min(target.threads, enough))


def pieces(spec: ChoiceSpec, schedule: CPUChoice) -> int:
    """Into how many pieces each row is cut."""
    if spec.rows >= schedule.parts or not spec.draw: return 1
    return min(-(-schedule.parts // spec.rows), -(-spec.size // PART_ELEMENTS))


def build(spec: ChoiceSpec, schedule: CPUChoice) -> CPUKernel:
    """The kernel: tokens, keys, or for each piece its largest number's bits and where that is; logits;
    numbers and places of a draw."""
    cut, parts = pieces(spec, schedule), schedule.parts
    start = f" + {spec.first // 2}" if spec.first else ""
    noise = f"""
      if (drawn && any_((x[0] != -__builtin_inff()) | (x[1] != -__builtin_inff()))) {{
        vu a = (vu)((vi)(s32)(i / 2{start}) + iota_()) + key[2], b = (vu)((u32)places[row] + key[0]);
        {" ".join(_rounds(number) for number in range(5))}
        const vu bits[2] = {{lows(a, b), highs(a, b)}};
        UNROLLED for (int half = 0; half < 2; half++) {{
          vf uniform = (__builtin_convertvector(bits[half] >> 9, vf) + 0.5f) * 0x1p-23f;
          const vf noise = minus_log(minus_log(uniform));
          x[half] = x[half] + noise;
        }}
      }}""" if spec.draw else ""
    seed = f"""
    const float *number = numbers + row * {NUMBERS}, *seed = number + {int(Number.seed)};
    const u32 low = (u32)seed[0] | (u32)seed[1] << 16, high = (u32)seed[2] | (u32)seed[3] << 16;
    const u32 key[3] = {{high, low ^ high ^ 0x1bd11bda, low}};
    const int drawn = number[{int(Number.temperature)}] > 0.f;"""
    if not spec.draw: seed = ""
    stored = _store_result(spec) if cut == 1 else \
        "out[2 * piece] = nan ? 0x7fc00000 : bits_(best); out[2 * piece + 1] = at;"
    body = f"""
  const s64 every = {spec.rows * cut}, steps = ({spec.size} + 2 * W - 1) / (2 * W);
  for (s64 piece = core_id * every / {parts}; piece < (core_id + 1) * every / {parts}; piece++) {{
    const s64 row = piece / {cut}, first = piece % {cut} * steps / {cut} * 2 * W;
    const s64 last = (piece % {cut} + 1) * steps / {cut} * 2 * W;
    const float *from = logits + row * {spec.size};{seed}
    vf top = (vf)-__builtin_inff(); vi where = (vi)(s32)first + iota_(), odd = (vi)0;
    for (s64 i = first; i < last; i += 2 * W) {{
      vf x[2];
      UNROLLED for (int half = 0; half < 2; half++) {{
        const s64 left = {spec.size} - i - half * W;
        x[half] = left > 0 ? load_n_f32(from + i + half * W, left) : (vf)-__builtin_inff();
        if (left < W) x[half] = pick(iota_() < (s32)left, x[half], (vf)-__builtin_inff());
      }}{noise}
      UNROLLED for (int half = 0; half < 2; half++) {{
        const vi better = x[half] > top;
        top = pick(better, x[half], top);
        where = pick_i(better, (vi)(s32)(i + half * W) + iota_(), where);
        odd |= x[half] != x[half];
      }}
    }}
    const int nan = any_(odd);
    float best = top[0]; s32 at = where[0];
    for (int lane = 1; lane < W; lane++)
      if (top[lane] > best || (top[lane] == best && where[lane] < at)) best = top[lane], at = where[lane];
    {stored}
  }}"""
    inputs = [("float", "logits"), *[("float", "numbers"), ("s32", "places")] * spec.draw]
    out = _C_TYPE[spec.result_dtype] if cut == 1 else "s32"
    return kernel(f"choice_{spec.rows}x{spec.size}", schedule.isa, body, [(out, "out")], inputs,
                  parts=parts, before=_BEFORE + _LOG + _interleaving(schedule.isa.lanes))


def whole(spec: ChoiceSpec, schedule: CPUChoice) -> CPUKernel | Chain:
    """The kernel, or both where a row is chosen from in pieces."""
    made, cut = build(spec, schedule), pieces(spec, schedule)
    if cut == 1: return made
    return Chain(made, merge_pieces(spec, schedule), Scratch(dtypes.int32, 2 * cut * spec.rows))


def merge_pieces(spec: ChoiceSpec, schedule: CPUChoice) -> CPUKernel:
    """The kernel after that of several pieces: tokens or keys; what that has found."""
    cut = pieces(spec, schedule)
    body = f"""
  for (s64 row = 0; row < {spec.rows}; row++) {{
    const s32 *found = pieces + row * {2 * cut};
    float best = float_(found[0]); s32 at = found[1];
    int nan = best != best;
    for (int piece = 1; piece < {cut}; piece++) {{
      const float x = float_(found[2 * piece]);
      nan |= x != x;
      if (x > best) best = x, at = found[2 * piece + 1];
    }}
    {_store_result(spec)}
  }}"""
    out = [(_C_TYPE[spec.result_dtype], "out")]
    return kernel(f"pieces_{spec.rows}x{cut}", schedule.isa, body, out, [("s32", "pieces")], before=_BEFORE)


def _store_result(spec: ChoiceSpec) -> str:
    """Returns C that stores a row's result."""
    if spec.first is None: return f"out[row] = nan ? {spec.size} : at;"
    return f"out[row] = nan ? ~0ull : key_(best, (u32)at + {spec.first}u);"


def _rounds(number: int) -> str:
    """Four rounds, and the key after them."""
    mixed = [f"a = a + b; b = a ^ ((b << {r}) + (b >> {32 - r}));" for r in ROTATIONS[number % 2]]
    return " ".join([*mixed, f"a = a + key[{number % 3}]; b = b + (key[{(number + 1) % 3}] + {number + 1});"])


def _interleaving(lanes: int) -> str:
    """Words of pairs of tokens, in the order of tokens."""
    turns = [i // 2 + i % 2 * lanes for i in range(lanes)]
    return "".join(f"INLINE vu {name}(vu low, vu high) {{ return __builtin_shufflevector(low, high, "
                   f"{', '.join(str(i + start) for i in turns)}); }}\n"
                   for name, start in (("lows", 0), ("highs", lanes // 2)))


_BEFORE = """
#define UNROLLED _Pragma("unroll")
INLINE int any_(vi x) { s32 all = 0; for (int i = 0; i < W; i++) all |= x[i]; return all != 0; }
INLINE s32 bits_(float x) { union { float f; s32 i; } both = {x}; return both.i; }
INLINE float float_(s32 x) { union { s32 i; float f; } both = {x}; return both.f; }
INLINE u64 key_(float x, u32 at) {
  const u32 bits = (u32)bits_(x == 0.f ? 0.f : x);
  return (u64)(bits >> 31 ? ~bits : bits | 0x80000000u) << 32 | (u32)~at;
}
"""
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


class CPUCount(CPUSchedule):
    """One part."""
    template: ClassVar[str] = "count"


def default_count(spec: CountSpec, target: CPU) -> CPUCount:
    """The schedule."""
    return CPUCount(target.isa)


def build_count(spec: CountSpec, schedule: CPUCount) -> CPUKernel:
    """The kernel: counts, slots of the rows, tokens."""
    body = f"""
  for (int r = 0; r < {spec.rows}; r++) {{
    const s32 slot = slots[r], token = tokens[r];
    if (slot >= 0 && slot < {spec.slots} && token >= 0 && token < {spec.size})
      counts[slot * {spec.size}LL + token] += 1.f;
  }}"""
    return kernel("count", schedule.isa, body, [("float", "counts")], [("s32", "slots"), ("s32", "tokens")])
