"""Attention forward: softmax(score(q kᵀ)) v by tiles of rows, which go through the keys block by block.

Protocol: as FlashAttention-2 (arXiv 2307.08691), for a processor with vectors. A tile is `rows` rows of
each of `heads` query heads of a key head; its q and the result so far lie in a core's cache:

    for each block of `block_n` columns that a row of the tile sees:
        keys, values = the block of k, transposed; the block of v       blocks.py, for all rows
        for each ROWS rows of a head:
            s = q kᵀ                                                    registers, vectors along columns
            s = score(s), −inf where the band hides a column            score.py
            top' = max(top, s);  p = 2^(s − top');  alpha = 2^(top − top')
            sum = alpha sum + p;  o = alpha o + p v
    out = o / sum;  l = (top + log2 sum) · ln 2

Of `documents` (score.py) a tile is of one document, whose first token is row 0 and column 0. Scores are
in base 2 here. Columns that none of ROWS rows see are left out by vectors. Tiles are the same
whatever `parts`; parts take turns with them, the longest first and back and forth, so that those of a causal
attention have equally much to do.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tinygrad_nv.cpu.attention import score as flash_score
from tinygrad_nv.cpu.attention.blocks import ROWS, AttentionBlocks
from tinygrad_nv.cpu.attention.score import C_INTEGERS, C
from tinygrad_nv.cpu.expression import c_float
from tinygrad_nv.cpu.kernel import CPUKernel, c_type, compute_integers, kernel, up
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.cpu.template import CPUSchedule
from tinygrad_nv.tile.attention.band import BlockRange
from tinygrad_nv.tile.attention.spec import KEEP_ALL, AttentionSpec, Rows, RowScales
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.launch import Integer
from tinygrad_nv.tile.schedule import count_words

BLOCK_N = 128          # a multiple of dropout's 64 columns
TILE_ROWS = 264        # rows for which a block is packed once
TILES_OF_THREAD = 4    # at least, as long as tiles have FEWEST_ROWS rows
FEWEST_ROWS = 48
PARTS_OF_THREAD = 4


@dataclass(frozen=True)
class CPUFlash(CPUSchedule):
    """A tile is `rows` queries of each of `heads` query heads of a key head, and goes through the keys in
    blocks of `block_n`."""
    rows: int = 6
    block_n: int = 128
    heads: int = 1
    template: ClassVar[str] = "flash"

    def words(self) -> list[str]:
        return [*super().words(), f"{self.rows}x{self.block_n}", count_words(self.heads, "head")]


def problems(spec: AttentionSpec, s: CPUFlash) -> list[str]:
    """Why this template does not take an attention; empty when it does."""
    return flash_score.problems(spec)


def default(spec: AttentionSpec, target: CPU) -> CPUFlash:
    """The default schedule, where none was tuned."""
    group = spec.batch[2]
    heads, rows = group, up(spec.s_q, ROWS)
    wanted = TILES_OF_THREAD * target.threads
    most = TILE_ROWS if max(spec.d, spec.d_v) <= 128 else TILE_ROWS // 2
    while heads > 1 and heads * ROWS > most: heads = -(-heads // 2)

    def tiles() -> int: return spec.batch[0] * spec.batch[1] * -(-group // heads) * -(-spec.s_q // rows)
    while rows > ROWS and (heads * rows > most or (tiles() < wanted and heads * rows >= 2 * FEWEST_ROWS)):
        rows = up(-(-rows // 2), ROWS)
    while heads > 1 and tiles() < target.threads: heads = -(-heads // 2)
    return CPUFlash(target.isa, min(tiles(), PARTS_OF_THREAD * target.threads), rows, BLOCK_N, heads)


def build(spec: AttentionSpec, schedule: CPUFlash, integers: Sequence[Integer] = ()) -> CPUKernel:
    """The kernel of an attention. With `integers` it takes the variables of a launch, of which what the spec
    has symbolic is computed."""
    isa = schedule.isa
    blocks = AttentionBlocks(isa, spec.q.dtype, spec.d, spec.d_v, schedule.block_n)
    names, bound = compute_integers(spec.symbolic, integers) if integers else (list(spec.symbolic), "")
    outputs = [(c_type(spec.out.dtype), "out"), *[("float", "logs")] * spec.lse]
    inputs = [(c_type(one.dtype), name) for one, name in ((spec.q, "q"), (spec.k, "k"), (spec.v, "v"))]
    if spec.scales is not None: inputs += [("float", f"scale_{name}") for name in "qkv"]
    if spec.is_ragged: inputs += [("s32", "cu_q"), ("s32", "cu_k")]
    if spec.sinks is not None: inputs.append(("float", "sinks"))
    if spec.kept < KEEP_ALL: inputs.append(("u32", "seed"))
    inputs += [(c_type(dtype), f"x{i}") for i, dtype in enumerate(spec.parameters)]
    name = f"flash_{spec.s_q}x{spec.s_kv}x{spec.d}"
    body = _documents(spec, schedule, blocks) if spec.documents else _body(spec, schedule, blocks)
    before = blocks.text() + flash_score.before(spec)
    return kernel(name, isa, bound + body, outputs, inputs, names, schedule.parts, before=before)


def _body(spec: AttentionSpec, schedule: CPUFlash, blocks: AttentionBlocks) -> str:
    """Returns C of the tiles that a part has, and of a tile."""
    (b, kv, group), rows, heads = spec.batch, schedule.rows, schedule.heads
    divided = -(-group // heads)
    matrices, tiles_of_head = b * kv * divided, -(-spec.s_q // rows)
    parts, tiles = schedule.parts, matrices * tiles_of_head
    return f"""
  for (s64 turn = 0; turn * {parts} < {tiles}; turn++) {{
    const s64 tile = turn * {parts} + (turn & 1 ? {parts - 1} - core_id : core_id);
    if (tile >= {tiles}) continue;
    const s64 which = tile % {matrices}, first_row = ({tiles_of_head - 1} - tile / {matrices}) * {rows};
    const s64 b0 = which / {kv * divided}, b1 = which / {divided} % {kv};
    const s64 first_head = which % {divided} * {heads};
    const s64 heads = first_head + {heads} <= {group} ? {heads} : {group} - first_head;
    {_extents(spec)}
    const s64 count = rows_q - first_row < {rows} ? rows_q - first_row : {rows};
    {_tile(spec, schedule, blocks)}
  }}
  {_clear_rest(spec, parts)}"""


def _documents(spec: AttentionSpec, schedule: CPUFlash, blocks: AttentionBlocks) -> str:
    """The tiles of documents: every part counts all of them, and takes its own. Rows of none become zeros."""
    (b, kv, group), rows, heads = spec.batch, schedule.rows, schedule.heads
    kind, at = short(spec.out.dtype), _at(spec.out, "b0", "b1", "head", "r")
    logs = f"logs[{_log(spec, 'head', 'r')}] = -__builtin_inff();" if spec.lse else ""
    inside = f"""for (s64 r0 = lead; r0 < s_q; r0 += {rows})
      for (s64 first_head = 0; first_head < {group}; first_head += {heads}) {{
      if (number++ % {schedule.parts} != core_id) continue;
      const s64 heads = smaller({heads}, {group} - first_head), first_row = r0 - lead;
      const s64 at_q = lead, at_k = lead, rows_k = s_kv - lead, starts = 0;
      const s64 count = smaller(s_q - r0, {rows});
      {_tile(spec, schedule, blocks)}
    }}"""
    outside = f"""if (number++ % {schedule.parts} == core_id) for (s64 r = lead; r < s_q; r++)
      for (s64 head = 0; head < {group}; head++) {{
      for (s64 x = 0; x < {spec.d_v}; x += W) store_n_{kind}(out + {at} + x, (vf)0.f, {spec.d_v} - x);
      {logs}
    }}"""
    return f"""
  s64 number = 0;
  for (s64 b0 = 0; b0 < {b}; b0++) for (s64 b1 = 0; b1 < {kv}; b1++)
  {flash_score.loop_documents(spec, inside, outside)}"""


def _log(spec: AttentionSpec, head: str, row: str) -> str:
    """Returns C of where l of a row is."""
    return f"((b0 * {spec.batch[1]} + b1) * {spec.batch[2]} + {head}) * {spec.s_q} + {row}"


def _extents(spec: AttentionSpec) -> str:
    """Rows of q and k, where row 0 stands, and where the first rows lie."""
    if spec.is_ragged:
        return f"""const s64 at_q = cu_q[b0], at_k = cu_k[b0];
    const s64 has_q = cu_q[b0 + 1] - at_q, rows_q = has_q < {spec.s_q} ? has_q : {spec.s_q};
    const s64 has_k = cu_k[b0 + 1] - at_k, rows_k = has_k < {spec.s_kv} ? has_k : {spec.s_kv};
    const s64 starts = rows_k - rows_q;"""
    s_q, s_kv, start = (name if name in spec.symbolic else str(getattr(spec, name))
                        for name in ("s_q", "s_kv", "start"))
    return f"const s64 at_q = 0, at_k = 0, rows_q = {s_q}, rows_k = {s_kv}, starts = {start};"


def _clear_rest(spec: AttentionSpec, parts: int) -> str:
    """Rows of a ragged result that are no sequence's, or after the most that one has, become zeros."""
    if spec.total is None: return ""
    kind, last, where = short(spec.out.dtype), spec.batch[0] - 1, _at(spec.out, "0", "b1", "head", "r")
    return f"""for (s64 b0 = 0; b0 <= {last}; b0++) {{
    const s64 has = cu_q[b0 + 1] - cu_q[b0], end = b0 < {last} ? cu_q[b0 + 1] : {spec.total[0]};
    const s64 first = cu_q[b0] + (has < {spec.s_q} ? has : {spec.s_q});
    for (s64 r = first + core_id; r < end; r += {parts})
      for (s64 b1 = 0; b1 < {spec.batch[1]}; b1++) for (s64 head = 0; head < {spec.batch[2]}; head++)
        for (s64 x = 0; x < {spec.d_v}; x += W)
          store_n_{kind}(out + {where} + x, (vf)0.f, {spec.d_v} - x);
  }}"""


def _at(rows: Rows, b: str, head: str, group: str, row: str) -> str:
    terms = [str(rows.offset)]
    for name, stride in zip((b, head, group, row), (*rows.batch, rows.row), strict=True):
        if stride: terms.append(f"({name}) * (s64){stride}")
    return " + ".join(terms)


def _scale(name: str, scales: RowScales, group: str, row: str) -> str:
    places = zip(("b0", "b1", group), scales.batch, strict=True)
    terms = [str(scales.offset), *(f"({place}) * (s64){stride}" for place, stride in places if stride)]
    if scales.block: terms.append(f"(({row}) / {scales.rows}) * (s64){scales.block}")
    return f"scale_{name}[{' + '.join(terms)}]"


def _tile(spec: AttentionSpec, schedule: CPUFlash, blocks: AttentionBlocks) -> str:
    n, rows, heads = schedule.block_n, schedule.rows, schedule.heads
    held, element, total = ("s32" if blocks.pairs else "float"), blocks.element, heads * rows
    seen = BlockRange(C_INTEGERS, spec.band, C("first_row + starts"), C("first_row + count + starts"),
                      C("rows_k")).visible()
    scales = "" if spec.scales is None else f"""
      for (s64 c = 0; c < cols; c++) {{
        const s64 at = c0 + c;
        of_keys[c] = {_scale("k", spec.scales[1], "0", "at")};
        of_values[c] = {_scale("v", spec.scales[2], "0", "at")};
      }}"""
    of_keys, of_values = ("0", "0") if spec.scales is None else ("of_keys", "of_values")
    k, v = (_at(one, "b0", "b1", "0", "at_k + c0") for one in (spec.k, spec.v))
    weights = f"u16 weights[{ROWS * n}] __attribute__((aligned(64)));" if blocks.pairs else ""
    return f"""
    {held} qs_[{total * blocks.units}] __attribute__((aligned(64)));
    float o_[{total * blocks.width}] __attribute__((aligned(64)));
    vf sums_[{total}]; float tops_[{total}];
    {element} keys[{blocks.keys * n}] __attribute__((aligned(64)));
    {element} values[{n * blocks.width}] __attribute__((aligned(64)));
    float s[{ROWS * n}] __attribute__((aligned(64)));
    {weights} {"" if spec.scales is None else f"float of_keys[{n}], of_values[{n}];"}
    {_load_queries(spec, schedule, blocks)}
    const s64 first_column = {seen.begin}, end_column = {seen.end};
    for (s64 c0 = first_column / {n} * {n}; count > 0 && c0 < end_column; c0 += {n}) {{
      const s64 cols = end_column - c0 < {n} ? end_column - c0 : {n};
      const s64 hidden = first_column > c0 ? first_column - c0 : 0;{scales}
      pack_keys(keys, k + {k}, {spec.k.row}, cols, {of_keys});
      pack_values(values, v + {v}, {spec.v.row}, hidden, cols, {of_values});
      for (s64 head = 0; head < heads; head++) for (s64 r = 0; r < count; r += {ROWS}) {{
        {flash_score.softmax(spec, blocks, rows)}
      }}
    }}
    for (s64 head = 0; head < heads; head++) for (s64 r = 0; r < count; r++) {{
      {_store_row(spec, blocks, rows)}
    }}"""


def _load_queries(spec: AttentionSpec, schedule: CPUFlash, blocks: AttentionBlocks) -> str:
    """Returns C that loads q of a tile, rows after the last zeros; no result yet."""
    kind, rows, units = short(spec.q.dtype), schedule.rows, blocks.units
    if blocks.pairs:
        copy = f"""for (s64 x = 0; x < {units}; x += W)
          store_n_s32(to + x, some_pairs(row + 2 * x, {spec.d} - 2 * x), {units} - x);"""
        clear = f"for (s64 x = 0; x < {units}; x++) to[x] = 0;"
    else:
        scale = ""
        if spec.scales is not None:
            scale = " * " + _scale("q", spec.scales[0], "first_head + head", "first_row + r")
        copy = f"""for (s64 x = 0; x < {units}; x += W)
          store_n_f32(to + x, load_n_{kind}(row + x, {spec.d} - x){scale}, {units} - x);"""
        clear = f"for (s64 x = 0; x < {units}; x++) to[x] = 0.f;"
    held = "s32" if blocks.pairs else "float"
    where = _at(spec.q, "b0", "b1", "first_head + head", "at_q + first_row + r")
    return f"""const s64 whole = (count + {ROWS - 1}) / {ROWS} * {ROWS};
    for (s64 head = 0; head < heads; head++) for (s64 r = 0; r < whole; r++) {{
      const s64 i = head * {rows} + r;
      {held} *to = qs_ + i * {units};
      if (r < count) {{
        const {c_type(spec.q.dtype)} *row = q + {where};
        {copy}
      }} else {clear}
      tops_[i] = -__builtin_inff(); sums_[i] = (vf)0.f;
      for (s64 x = 0; x < {blocks.width}; x += W) store_f32(o_ + i * {blocks.width} + x, (vf)0.f);
    }}"""


def _total(spec: AttentionSpec) -> tuple[str, str]:
    """Returns C of what the sum of a row's weights is relative to, in base 2, and of that and its inverse: a
    sink is one more weight."""
    top = f"tops_[i] * {flash_score.base(spec)}"
    if spec.sinks is None:
        return top, f"""const float total = sum_(sums_[i]), share = total == 0.f ? 0.f
        : {flash_score.lift(spec)} / total;"""
    places = zip(("b0", "b1", "(first_head + head)"), spec.sinks, strict=True)
    at = " + ".join(["0", *(f"{place} * (s64){stride}" for place, stride in places if stride)])
    largest = c_float((2 - 2.0**-23) * 2.0**127)
    return "base", f"""const float own = {top}, logit = sinks[{at}] * {c_float(math.log2(math.e))};
      const float sink = logit < {largest} ? logit : {largest}, most = own > sink ? own : sink;
      const float base = most == -__builtin_inff() ? 0.f : most;
      const float weight = exp2_small((vf)(own - base))[0];
      const float total = sum_(sums_[i]) * weight + exp2_small((vf)(sink - base))[0];
      const float share = total == 0.f ? 0.f : weight * {flash_score.lift(spec)} / total;"""


def _store_row(spec: AttentionSpec, blocks: AttentionBlocks, rows: int) -> str:
    """Returns C that stores a row of the result, and of l."""
    out, kind = spec.out, short(spec.out.dtype)
    where = _at(out, "b0", "b1", "first_head + head", "at_q + first_row + r")
    top, total = _total(spec)
    row = "first_row + r" if not spec.documents else "lead + first_row + r"
    logs = f"""
      logs[{_log(spec, "first_head + head", row)}] =
        (log2_((vf)total)[0] + {top}) * {c_float(math.log(2))};"""
    return f"""const s64 i = head * {rows} + r;
      {total}
      for (s64 x = 0; x < {spec.d_v}; x += W)
        store_n_{kind}(out + {where} + x, load_f32(o_ + i * {blocks.width} + x) * share, {spec.d_v} - x);
      {logs if spec.lse else ""}"""
