"""Prints the table of bugs and cures: `python -m tests.support.ptx.pairs_table`. Exit code 1 when a bug was
missed or a cure gave an alarm."""
from __future__ import annotations

import sys

from tests.support.ptx.pairs import ALL, SEEDS, rows, table


def main() -> int:
    """Runs all pairs."""
    made = rows(ALL)
    print(table(made))
    return any(r.seeds < len(SEEDS) or r.alarms for r in made)


if __name__ == "__main__": sys.exit(main())
