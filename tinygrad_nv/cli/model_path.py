"""MODEL of a command line as a directory or a GGUF file.

Protocol: `find_model(name)` is a path as it is, or the snapshot that a hub name (`org/model`,
`org/model@revision`) has in the Hugging Face cache: $HF_HUB_CACHE, else $HF_HOME/hub, else
~/.cache/huggingface/hub. Nothing is downloaded unless that is asked for. A path that is no model, or neither
exists nor is a hub name, is left to the loader, which says what it is. `list_names` are a server's.
"""
from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from tinygrad_nv.errors import ModelError

HUB_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[\w.-]+))?")
TEXTS = ("*.json", "*.jinja", "*.txt", "*.model")     # configurations, tokenizers and templates
MODEL = "a model directory (with config.json), a GGUF file, or a hub name such as Qwen/Qwen3-0.6B"


def find_model(name: str, download: bool = False) -> Path:
    """Returns the directory or GGUF file that a name means; with `download`, a hub name is fetched if it is
    not here."""
    if os.path.exists(name) or (match := HUB_NAME.fullmatch(name)) is None: return Path(name)
    repo, revision = match["repo"], match["revision"] or "main"
    try: return _snapshot(repo, revision)
    except ModelError:
        if not download: raise
    _download(repo, revision)
    return _snapshot(repo, revision)


def list_names(named: Sequence[str] | None, given: str | None, directory: Path) -> list[str]:
    """Returns the names that a server answers to: those of --served-model-name, or the hub name that it was
    started with, or the directory's name and the path as it was `given`."""
    if named: return list(named)
    if given is None: return [directory.resolve().name]
    if not os.path.exists(given) and (match := HUB_NAME.fullmatch(given)) is not None: return [match["repo"]]
    return list(dict.fromkeys((directory.resolve().name, given)))


def _download(repo: str, revision: str) -> None:
    """Fetches what a model is of, by `hf`'s own code. Raises `ModelError`."""
    try:
        import huggingface_hub as hub
        from huggingface_hub.errors import OfflineModeIsEnabled
    except ImportError as error:
        raise ModelError(f"--download {repo}, without the package huggingface_hub", "it",
                         "pip install 'tinygrad-nv[hub]'") from error
    try:
        files = hub.HfApi().list_repo_files(repo, revision=revision)
        hub.snapshot_download(repo, revision=revision, cache_dir=hub_cache(),
                              allow_patterns=_select_files(files))
    except OfflineModeIsEnabled as error:
        raise ModelError(f"--download {repo}, and HF_HUB_OFFLINE is set", "a connection",
                         "unset HF_HUB_OFFLINE, or name a directory") from error
    except Exception as error:  # of the HTTP library, which is another in each version
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"{repo} at {revision} could not be downloaded: {reason or type(error).__name__}",
                         "a repository that exists and that you may read, and a connection",
                         "correct the name, or log in with `hf auth login`") from error


def _select_files(files: list[str]) -> list[str]:
    """Returns patterns of the files that are read: safetensors where there are any, else a GGUF file."""
    if any(name.endswith(".safetensors") for name in files): return [*TEXTS, "*.safetensors"]
    made = [name for name in files if name.endswith(".gguf")]
    if len(made) > 1:
        raise ValueError(f"it has {len(made)} GGUF files, such as {made[0]}; name one: hf download REPO FILE")
    return [*TEXTS, *made]


def hub_cache() -> Path:
    """Returns the directory where Hugging Face's libraries keep what they download."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hub"


def _snapshot(repo: str, revision: str) -> Path:
    """A downloaded revision of a repository: a branch or tag names its commit in refs/."""
    cache = hub_cache()
    folder = cache / f"models--{repo.replace('/', '--')}"
    at = "" if revision == "main" else f" --revision {revision}"
    download = f"add --download, or run: hf download {repo}{at}"
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
