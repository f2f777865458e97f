"""Tables as text."""
from __future__ import annotations

from collections.abc import Sequence


def align_columns(rows: Sequence[Sequence[str]], numbers: tuple[int, ...] = ()) -> list[str]:
    """Rows of a table as lines; columns in `numbers` to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(row[i].rjust(width) if i in numbers else row[i].ljust(width)
                      for i, width in enumerate(widths)).rstrip() for row in rows]
