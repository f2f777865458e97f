"""Finds GGUF files. gguf/ reads it, and is loaded for a model that is one."""
from __future__ import annotations

from pathlib import Path

from tinygrad_nv.errors import ModelError


def find(path: Path) -> Path | None:
    """The GGUF file that `path` is, or the only one in a directory without config.json; of a model in several
    files one of them. Raises `ModelError` for several models."""
    if path.is_file():
        try:
            with path.open("rb") as file: start = file.read(4)
        except OSError: start = b""
        return path if start == b"GGUF" or path.suffix.lower() == ".gguf" else None
    if not path.is_dir() or (path / "config.json").is_file(): return None
    found = sorted(each for each in path.glob("*") if each.suffix.lower() == ".gguf")
    if not found: return None
    from tinygrad_nv.quant.gguf.split import parts_of
    if len({parts_of(each)[0] for each in found}) > 1:
        raise ModelError(f"{path} holds {len(found)} GGUF files ({found[0].name}, {found[1].name}, …)",
                         "one, or the name of one", f"name the file: {found[0]}")
    return found[0]
