"""A file of options, YAML or JSON: what `--config` of `train`, `serve`, `run-batch`, `chat` and `generate`
reads."""
from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from tinygrad_nv.errors import ConfigError
from tinygrad_nv.files import parse_json, read_text

MAX_OPTION_BYTES = 256 << 10    # limit: bytes of a file of options; YAML takes 2 s for as many
MAX_OPTION_VALUES = 65_536      # limit: values of a file of options, each alias of YAML written out


def read(path: Path) -> dict[str, Any]:
    """Returns the options of a file by name, with underscores for dashes. Raises `ConfigError`."""
    try: text = read_text(path, MAX_OPTION_BYTES, pipes=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} cannot be read: {getattr(error, 'strerror', None) or error}",
                          "a UTF-8 file that can be read", "correct its name") from error
    found = _parse(path, text)
    if not isinstance(found, Mapping):
        raise ConfigError(f"--config {path} is a {type(found).__name__}", "options and their values",
                          "write one `option: value` a line")
    return {str(key).replace("-", "_"): value for key, value in found.items()}


def _parse(path: Path, text: str) -> Any:
    try:
        found = parse_json(text) if path.suffix == ".json" else _load_yaml(path, text)
        _count_values(found, {})
        return found
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--config {path}: {error}", "YAML, or JSON in a .json file",
                          "correct it") from error


def _load_yaml(path: Path, text: str) -> Any:
    try: yaml = import_module("yaml")
    except ImportError as error:
        raise ConfigError(f"--config {path}, without the package pyyaml", "YAML needs it",
                          "pip install 'tinygrad-nv[train]' or write a .json file") from error
    try: return yaml.safe_load(text)
    except yaml.YAMLError as error: raise ValueError(str(error)) from error


def _count_values(value: Any, counts: dict[int, int]) -> int:
    """Counts the values in a value. A list that aliases name again and again is one object, whose count is
    kept in `counts`, and whose text would be as long as all of them. Raises ValueError for too many."""
    if not isinstance(value, list | dict): return 1
    if id(value) not in counts:
        counts[id(value)] = MAX_OPTION_VALUES       # while it is counted: a list that is in itself
        counts[id(value)] = 1 + sum(_count_values(each, counts)
                                    for each in (value.values() if isinstance(value, dict) else value))
    if counts[id(value)] > MAX_OPTION_VALUES:
        raise ValueError(f"more than {MAX_OPTION_VALUES} values, aliases written out")
    return counts[id(value)]
