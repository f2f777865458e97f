"""A GGUF model in several files, as llama.cpp's gguf-split writes them.

Their names end in -00001-of-00003.gguf. Each has split.no, from 0, and split.count; the first has the other
metadata, too. Tensors are in any of them.
"""
from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from tinygrad_nv.errors import WeightError
from tinygrad_nv.quant.gguf.file import GGUFFile, open_file

NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE | re.DOTALL)


def parts_of(path: Path) -> list[Path]:
    """All files of the model that `path` is one of, in order, whether they are there or not."""
    if (found := NAME.fullmatch(path.name)) is None: return [path]
    stem, count, end = found[1], int(found[3]), path.name[-len(".gguf"):]
    return [path.with_name(f"{stem}-{i + 1:05}-of-{count:05}{end}") for i in range(count)] or [path]


def open_gguf(path: Path) -> GGUFFile:
    """The model of the file at `path`, which may be any of its parts. Raises `WeightError` for one that is
    damaged or missing, or of a kind that is not read."""
    file = open_file(path)
    count = file.metadata.get("split.count", 1)
    if count in (0, 1): return file
    paths = parts_of(path)
    if len(paths) != count:
        raise WeightError(f"{path} is one of {count} files of a model",
                          f"a name that ends in -00001-of-{count:05}.gguf, and the others beside it"
                          if isinstance(count, int) else "a number in split.count",
                          "give the files the names they were published with, or merge them with "
                          "llama-gguf-split --merge")
    if missing := [each.name for each in paths if not each.is_file()]:
        raise WeightError(f"{path.parent} lacks {len(missing)} of the {count} files of {paths[0].name}: "
                          f"{', '.join(missing[:8])}", "every part of the model, in one directory",
                          "download the missing files")
    opened = [open_file(each) for each in paths]
    first, tensors = opened[0], dict(opened[0].tensors)
    for i, part in enumerate(opened):
        number = part.metadata.get("split.no"), part.metadata.get("split.count")
        if number != (i, count):
            raise WeightError(f"{part.path} has split.no {number[0]!r} and split.count {number[1]!r}",
                              f"{i} and {count}, as its name says", "download the file again")
        if i and (twice := tensors.keys() & part.tensors.keys()):
            raise WeightError(f"{part.path}: tensor {min(twice)} is in another part, too", "each tensor once",
                              "download the files again")
        tensors |= part.tensors
    total = first.metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise WeightError(f"the {count} files of {first.path.name} have {len(tensors)} tensors",
                          f"{total}, as split.tensors.count says", "download the files again")
    data = {each: mapped for part in opened for each, mapped in part.data.items()}
    return replace(first, tensors=tensors, data=data)
