"""MODEL of a command line as a directory or a GGUF file.

Protocol: `found(name)` is a path as it is, or the snapshot that a hub name (`org/model`,
`org/model@revision`) has in the Hugging Face cache: $HF_HUB_CACHE, else $HF_HOME/hub, else
~/.cache/huggingface/hub. Nothing is downloaded. A path that is no model, or neither exists nor is a hub name,
is left to the loader, which says what it is.
"""
from __future__ import annotations

import os
import re
from pathlib import Path

from tinygrad_nv.errors import ModelError

HUB_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[\w.-]+))?")
MODEL = "a model directory (with config.json), a GGUF file, or a hub name such as Qwen/Qwen3-0.6B"


def found(name: str) -> Path:
    """The directory or GGUF file that a name means."""
    if os.path.exists(name) or (match := HUB_NAME.fullmatch(name)) is None: return Path(name)
    return _snapshot(match["repo"], match["revision"] or "main")


def hub_cache() -> Path:
    """Where Hugging Face's libraries keep what they download."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hub"


def _snapshot(repo: str, revision: str) -> Path:
    """A downloaded revision of a repository: a branch or tag names its commit in refs/."""
    cache = hub_cache()
    folder = cache / f"models--{repo.replace('/', '--')}"
    at = "" if revision == "main" else f" --revision {revision}"
    download = f"hf download {repo}{at}"
    if not folder.is_dir():
        raise ModelError(f"{repo} is neither a directory here nor a model in the Hugging Face cache, {cache}",
                         MODEL, download)
    ref = folder / "refs" / revision
    commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision
    snapshot = folder / "snapshots" / commit
    if not snapshot.is_dir():
        known = sorted(each.name for each in (folder / "refs").glob("*"))
        raise ModelError(f"{repo} is in the Hugging Face cache, {cache}, without revision {revision}",
                         f"one of {', '.join(known)}" if known else "a downloaded revision", download)
    names = ("config.json", "adapter_config.json", "model_index.json")
    if not any((snapshot / name).is_file() for name in names) \
            and not any(snapshot.glob("*.gguf")):
        raise ModelError(f"{repo} is in the Hugging Face cache without its config.json: {snapshot}",
                         "a download that is complete", download)
    return snapshot
