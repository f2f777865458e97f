"""Draws docs/images/lowering.svg: a matmul from Tensor to spec, tile and PTX, as `explain` shows it.

    python docs/scripts/lowering_svg.py            # writes it
    python docs/scripts/lowering_svg.py --check    # exit code 1 where it is not what explain shows today
"""
from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from svg import cut, document, text

OUT = Path(__file__).parents[1] / "images" / "lowering.svg"
PROGRAM = """\
from tinygrad_nv import Tensor, dtypes, explain

x = Tensor.empty(4096, 4096, dtype=dtypes.bfloat16)
w = Tensor.empty(4096, 4096, dtype=dtypes.bfloat16)
bias = Tensor.empty(4096, dtype=dtypes.bfloat16)

y = (x @ w.T + bias).relu()
explain(y).show("ptx")"""
SIZE, LEADING = 11.0, 15.5
SPEC = ("extents", "a ", "b ", "out ", "sums", "work", "x0", "epilogue", "   ")
TILE = ("wgmma", "tiles", "steps", "stages", "grid", "predicted", "at best", "shared", "registers")
# the first line with each, in this order: two loads, the main loop's wgmma, the store
PTX = (r"mbarrier\.try_wait", r"cp\.async\.bulk\.tensor\S+complete_tx::bytes ", r"multicast", r"wgmma\.fence",
       r"wgmma\.mma_async", r"wgmma\.commit", r"wgmma\.wait", r"cp\.async\.bulk\.tensor\S+bulk_group")


def levels() -> dict[str, list[str]]:
    """Returns the lines of explain at each level, for an emulated H100."""
    from tinygrad_nv import Context
    from tinygrad_nv.explain.lowering import Lowering
    found: dict[str, Lowering] = {}
    with Context(DEV="EMU"):
        exec(PROGRAM.rpartition("\n")[0] + "\nfound['y'] = explain(y)", {"found": found})
    return {level: found["y"].show(level).splitlines() for level in ("spec", "tile", "ptx")}


def some(lines: Sequence[str], starts: Sequence[str]) -> list[str]:
    """Returns the lines that begin so."""
    return [line for line in lines if line.startswith(tuple(starts))]


def instructions(lines: Sequence[str]) -> Iterator[str]:
    """Yields the instructions of `PTX`, with long lists of registers shortened."""
    rest = iter(lines)
    for pattern in PTX:
        line = next(line for line in rest if re.search(pattern, line)).strip()
        yield re.sub(r"\{(%f\d+), .*?(%f\d+)\}", r"{\1 … \2}", line)


def panel(x: float, y: float, width: float, height: float, title: str, lines: Sequence[str],
          first: str = "accent") -> Iterator[str]:
    """Yields a box with a title and lines, of which the first stands out."""
    yield (f'<rect class="panel" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>')
    yield text(x + 12, y + 20, title, 12.5, "title")
    columns = int((width - 24) / (0.6 * SIZE))
    for number, line in enumerate(lines):
        kind = first if number == 0 else "dim" if line.startswith("from") else ""
        yield text(x + 12, y + 42 + LEADING * number, cut(line, columns), SIZE, kind)


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """Returns an arrow between two panels."""
    return (f'<path d="M{x1} {y1} L{x2} {y2}" stroke="var(--mark)" stroke-width="2.5" fill="none" '
            'marker-end="url(#head)"/>')


def tiles(x: float, y: float, side: float, line: str) -> Iterator[str]:
    """Yields a picture of the result's tiles, of the line "tiles 32 x 16 of 128 x 256": one cluster of two
    stands out, with the rows of A and the columns of B that it reads."""
    rows, columns = map(int, re.findall(r"\d+", line)[:2])
    down, right = side / rows, side / columns
    yield f'<rect x="{x}" y="{y}" width="{side}" height="{side}" fill="var(--page)" stroke="var(--line)"/>'
    for row in range(1, rows):
        yield f'<path d="M{x} {y + down * row:.1f} h{side}" stroke="var(--line)" stroke-width=".5"/>'
    for column in range(1, columns):
        yield f'<path d="M{x + right * column:.1f} {y} v{side}" stroke="var(--line)" stroke-width=".5"/>'
    top, left = y + down * 8, x + right * 5
    yield f'<rect x="{x}" y="{top:.1f}" width="{side}" height="{2 * down:.1f}" fill="var(--soft)"/>'
    yield f'<rect x="{left:.1f}" y="{y}" width="{right:.1f}" height="{side}" fill="var(--soft)"/>'
    yield (f'<rect x="{left:.1f}" y="{top:.1f}" width="{right:.1f}" height="{2 * down:.1f}" '
           'fill="var(--mark)"/>')
    yield text(x, y + side + 14, "a cluster of two tiles", 10, "dim")


def draw(shown: Mapping[str, Sequence[str]]) -> str:
    """Returns the picture of what `levels` has."""
    spec = [shown["spec"][1], *some(shown["spec"][2:], SPEC)]
    tile = some(shown["tile"][1:], TILE)
    ptx = list(instructions(shown["ptx"]))
    parts = ['<defs><marker id="head" markerWidth="7" markerHeight="7" refX="4" refY="3.5" orient="auto">'
             '<path d="M0 0 L7 3.5 L0 7 z" fill="var(--mark)"/></marker></defs>']
    parts += panel(12, 12, 396, 212, "1  Tensor: ordinary tinygrad", PROGRAM.splitlines(), "dim")
    parts += panel(436, 12, 552, 212, "2  spec: what is computed", spec)
    parts += panel(12, 250, 976, 194, "3  tile: how, chosen by a cost model", tile)
    parts += tiles(826, 272, 140, next(line for line in tile if line.startswith("tiles")))
    count = len(shown["ptx"]) - 1
    parts += panel(12, 470, 976, 166, f"4  PTX: {count} lines, some of which load, multiply and store",
                   ptx, "")
    parts += [arrow(408, 105, 430, 105), arrow(500, 224, 500, 244), arrow(500, 444, 500, 464)]
    return document(1000, 648, "A matmul from Tensor to spec, tile and PTX, as explain shows it", parts)


def main() -> int:
    """Writes the picture, or compares."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    made = draw(levels())
    if parser.parse_args().check: return int(OUT.read_text() != made)
    OUT.write_text(made)
    print(f"{OUT}: {len(made):,} bytes")
    return 0


if __name__ == "__main__": sys.exit(main())
