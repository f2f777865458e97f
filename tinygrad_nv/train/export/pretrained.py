"""A model as a Hugging Face directory: config.json, generation_config.json, weights, tokenizer files.

Protocol: `save_pretrained(model, directory, tokenizer_files_from)` changes all files of the directory
together (train/files.py): config.json is what makes it a model, and comes last. Other files of it stay.
"""
from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinygrad.dtype import DType

from tinygrad_nv.errors import ModelError
from tinygrad_nv.models.config import parse_config, read_json
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.multimodal import language_config
from tinygrad_nv.train.export.checkpoint_tensors import CONFIG_NAMES, sources
from tinygrad_nv.train.files import Source, replace_folder, shards, write_file, write_tensors

CONFIG, GENERATION, INDEX = "config.json", "generation_config.json", "model.safetensors.index.json"
SHARD_BYTES = 5 * 10 ** 9   # of a file, as transformers has it
# what transformers' tokenizers read
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
             "chat_template.jinja", "chat_template.json", "additional_chat_templates", "vocab.json",
             "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
             "tekken.json", "tiktoken.model", "tokenization_*.py")
WEIGHTS = ("model*.safetensors", INDEX, "pytorch_model*.bin", "pytorch_model.bin.index.json")
# of `ModelConfig`, what may differ from config.json's
ANY = ("dtype", "eos_token_ids", "quantization")
# of config.json, for a source without generation_config.json
GENERATED = ("bos_token_id", "eos_token_id", "pad_token_id")


def save_pretrained(model: Llama, directory: str | Path, tokenizer_files_from: str | Path,
                    dtype: DType | None = None, shard_bytes: int = SHARD_BYTES) -> Path:
    """Writes a model that transformers' and vLLM's from_pretrained load: the directory.

    config.json and the tokenizer's files are those of the Hugging Face directory `tokenizer_files_from`,
    whose config.json must describe `model`; of one that reads images, too, its language model is written.
    Weights are stored as `dtype`, the model's by default: float32, float16 or bfloat16. A file has at most
    `shard_bytes` bytes of tensors, unless one tensor has more. Raises `ModelError` for a model that cannot
    be stored, or of another config.json; `CheckpointError` for a directory that cannot be written."""
    dtype, source, directory = dtype or model.dtype, Path(tokenizer_files_from), Path(directory)
    if dtype not in CONFIG_NAMES:
        raise ModelError(f"dtype is {dtype}", f"one of: {', '.join(CONFIG_NAMES.values())}",
                         "pass one of these")
    config, tensors = _config(model, source, dtype), sources(model, dtype)
    def write(folder: Path) -> None:
        _write_weights(folder, tensors, shard_bytes)
        _write_rest(folder, source, config)
    nbytes = sum(each.nbytes for each in tensors.values())
    return replace_folder(directory, CONFIG, WEIGHTS, write, nbytes)


def _config(model: Llama, source: Path, dtype: DType) -> dict[str, Any]:
    """Returns the config.json of the model, with the dtype of its weights. Raises `ModelError`."""
    path = source / CONFIG
    if not path.is_file():
        raise ModelError(f"{source} has no {CONFIG}", "a Hugging Face directory of the model",
                         "pass the directory that the model was made from")
    data = dict(language_config(read_json(path), str(path)))
    theirs, ours = (vars(each) for each in (parse_config(data, str(path)), model.config))
    if differing := [name for name in theirs if name not in ANY and theirs[name] != ours[name]]:
        raise ModelError(f"{path} is of another model: its {differing[0]} is {theirs[differing[0]]!r}",
                         f"{ours[differing[0]]!r}, as the model has it",
                         "pass the directory that the model was made from")
    key = "torch_dtype" if "torch_dtype" in data and "dtype" not in data else "dtype"
    return data | {key: CONFIG_NAMES[dtype]}


def _write_weights(folder: Path, tensors: Mapping[str, Source], shard_bytes: int) -> None:
    """model.safetensors; or shards, and the index of their tensors."""
    files, places = shards(tensors, shard_bytes), dict[str, str]()
    for number, own in enumerate(files, 1):
        name = "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        write_tensors(folder / name, own)
        places |= dict.fromkeys(own, name)
    if len(files) == 1: return
    total = sum(each.nbytes for each in tensors.values())
    weight_map = dict(sorted(places.items()))
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_rest(folder: Path, source: Path, config: Mapping[str, Any]) -> None:
    """config.json, generation_config.json, and the tokenizer's files."""
    _write_json(folder / CONFIG, config)
    if (given := source / GENERATION).is_file(): _copy(given, folder / GENERATION)
    else:
        tokens = {key: config[key] for key in GENERATED if config.get(key) is not None}
        _write_json(folder / GENERATION, {"_from_model_config": True, **tokens})
    for pattern in TOKENIZER:
        for path in sorted(source.glob(pattern)):
            if path.is_file(): _copy(path, folder / path.name)
            else: shutil.copytree(path, folder / path.name)


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    write_file(path, ((json.dumps(data, indent=2) + "\n").encode(),))


def _copy(source: Path, target: Path) -> None:
    write_file(target, (source.read_bytes(),))
