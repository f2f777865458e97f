"""Helpers of the pictures of docs/images: colours for light and dark pages, and lines of text as SVG."""
from __future__ import annotations

from collections.abc import Iterable
from html import escape

FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
STYLE = f"""
text {{ font-family: {FONT}; fill: var(--ink) }}
svg {{ --page: #ffffff; --panel: #f6f8fa; --line: #c8d1da; --ink: #1f2328; --dim: #59636e;
  --accent: #0550ae; --mark: #bc4c00; --soft: #ddf4ff }}
@media (prefers-color-scheme: dark) {{ svg {{ --page: #0d1117; --panel: #161b22; --line: #3d444d;
  --ink: #e6edf3; --dim: #9198a1; --accent: #79c0ff; --mark: #ffa657; --soft: #1f3a5f }} }}
.dim {{ fill: var(--dim) }} .accent {{ fill: var(--accent) }} .mark {{ fill: var(--mark) }}
.title {{ font-weight: 600 }} .panel {{ fill: var(--panel); stroke: var(--line) }}
"""


def text(x: float, y: float, line: str, size: float, kind: str = "") -> str:
    """Returns a line of text, as wide in every font: 0.6 of the size a character."""
    if not line.strip(): return ""
    indent = len(line) - len(line.lstrip(" "))
    shown = line.strip()
    label = f' class="{kind}"' if kind else ""
    return (f'<text x="{x + 0.6 * size * indent:.1f}" y="{y:.1f}" font-size="{size:g}"{label} '
            f'textLength="{0.6 * size * len(shown):.1f}" lengthAdjust="spacingAndGlyphs" '
            f'xml:space="preserve">{escape(shown, quote=False)}</text>')


def cut(line: str, columns: int) -> str:
    """Cuts a line to so many columns, with an ellipsis."""
    return line if len(line) <= columns else line[:columns - 1] + "…"


def document(width: int, height: int, title: str, parts: Iterable[str], style: str = "") -> str:
    """Returns the file."""
    lines = "\n".join(part for part in parts if part)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img">\n<title>{escape(title)}</title>\n<style>{STYLE}{style}</style>\n'
            f'<rect width="{width}" height="{height}" rx="8" fill="var(--page)"/>\n{lines}\n</svg>\n')
