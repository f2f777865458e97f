"""A file of options, YAML or JSON: what `--config` of `train`, `serve`, `run-batch`, `chat` and `generate`
reads."""
from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from tinygrad_nv.errors import ConfigError
from tinygrad_nv.files import MAX_NAMED_BYTES, parse_json, read_text


def read(path: Path) -> dict[str, Any]:
    """Returns the options of a file by name, with underscores for dashes. Raises `ConfigError`."""
    try: text = read_text(path, MAX_NAMED_BYTES, pipes=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} cannot be read: {getattr(error, 'strerror', None) or error}",
                          "a UTF-8 file that can be read", "correct its name") from error
    found = _parsed(path, text)
    if not isinstance(found, Mapping):
        raise ConfigError(f"--config {path} is a {type(found).__name__}", "options and their values",
                          "write one `option: value` a line")
    return {str(key).replace("-", "_"): value for key, value in found.items()}


def _parsed(path: Path, text: str) -> Any:
    try:
        if path.suffix == ".json": return parse_json(text)
        try: yaml = import_module("yaml")
        except ImportError as error:
            raise ConfigError(f"--config {path}, without the package pyyaml", "YAML needs it",
                              "pip install 'tinygrad-nv[train]' or write a .json file") from error
        try: return yaml.safe_load(text)
        except yaml.YAMLError as error: raise ValueError(str(error)) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--config {path}: {error}", "YAML, or JSON in a .json file",
                          "correct it") from error
