"""`--config FILE`: options of a command from a file, as vLLM's `serve --config` reads them.

Protocol: `with_file(command, words)` returns the words of a command line with those of its file behind them.
Keys are long names of options; what the command line says itself is left out. true is an option that takes no
value, false its `--no-` form, a list several values or, of an option that takes one, JSON; null is nothing.
"""
from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinygrad_nv import option_file
from tinygrad_nv.cli.vllm_options import nearest
from tinygrad_nv.errors import ConfigError

OPTION, DEST = "--config", "option_file"


def with_file(command: argparse.ArgumentParser, words: Sequence[str]) -> tuple[list[str], str | None]:
    """Returns the words, and the file's `model`, which holds where the words have none. Raises
    `ConfigError`."""
    action = command._option_string_actions.get(OPTION)
    if action is None or action.dest != DEST: return [*words], None
    end = words.index("--") if "--" in words else len(words)
    finder = argparse.ArgumentParser(prog=command.prog, add_help=False, allow_abbrev=False)
    finder.add_argument(OPTION, type=Path)
    file: Path | None = finder.parse_known_args([*words[:end]])[0].config
    if file is None: return [*words], None
    options = option_file.read(file)
    model = options.pop("model", None)
    given, more = _find_given(command, words[:end]), list[str]()
    for name, value in options.items():
        option = "--" + name.replace("_", "-")
        found = command._option_string_actions.get(option)
        if found is None or found.dest in (DEST, "help"):
            raise ConfigError(f"{file}: unknown option {name}", f"long options of `{command.prog}`",
                              "correct its name" + nearest(command, [option]))
        if found.dest not in given: more += _words(command, found, option, value)
    return [*words[:end], *more, *words[end:]], None if model is None else str(model)


def _find_given(command: argparse.ArgumentParser, words: Sequence[str]) -> set[str]:
    """Returns what options of a command line set, abbreviated ones too."""
    found, options = set[str](), command._option_string_actions
    for word in words:
        name = word.partition("=")[0]
        if name in options: found.add(options[name].dest)
        elif name.startswith("--"):
            found |= {its.dest for key, its in options.items() if key.startswith(name)}
    return found


def _words(command: argparse.ArgumentParser, action: argparse.Action, option: str, value: Any) -> list[str]:
    """Returns the words that set an option."""
    if value is None: return []
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"{option[2:]} is {value!r} in a file of options", "true or false",
                              "correct it")
        off = "--no-" + option[2:]
        if value: return [option]
        return [off] if off in command._option_string_actions else []
    if isinstance(value, list) and action.nargs in ("+", "*"): return [option, *map(_text, value)]
    appended = isinstance(action, argparse._AppendAction)
    if isinstance(value, list) and appended: return [f"{option}={_text(each)}" for each in value]
    return [f"{option}={_text(value)}"]


def _text(value: Any) -> str: return value if isinstance(value, str) else json.dumps(value)
