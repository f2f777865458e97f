"""A user's kernel of a file, called with tensors of the shapes that its annotations say.

Protocol: `read_kernel("FILE.py:NAME")` imports the file. `make_arguments(kernel, given)` has a Tensor for
each annotated argument, whose dimensions are `given` by name, and the constants of these names. No kernel
runs.
"""
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinygrad import Tensor

from tinygrad_nv.errors import RequestError
from tinygrad_nv.language.arguments import OUT
from tinygrad_nv.language.kernels import Kernel
from tinygrad_nv.shapes.signature import type_of
from tinygrad_nv.shapes.sources import load


def read_kernel(text: str) -> Kernel:
    """The kernel of a file. Raises `RequestError` where there is none of the name."""
    file, colon, name = text.rpartition(":")
    if not colon or not name: raise RequestError(f"--program {text}", "FILE.py:KERNEL", "name a kernel")
    module = load(Path(file))
    there = {key: each for key, each in vars(module).items() if isinstance(each, Kernel)}
    if name not in there:
        raise RequestError(f"{file} has no kernel {name}", f"one of {', '.join(there)}" if there else
                           "functions with @kernel", "name one of them")
    return there[name]


def make_arguments(kernel: Kernel, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name. Raises `RequestError` for sizes that are not given, and for arguments
    that annotations do not say."""
    own, left = kernel.signature, dict(given)
    sizes = {key: left.pop(key) for key in own.symbols if key in left}
    made = {key: sizes[key] for key in own.parameters.parameters if key in sizes}
    for key, each in own.parameters.parameters.items():
        found = type_of(own.annotations.get(key))
        if found is not None and found.kind == OUT: continue
        if key in left: made[key] = left.pop(key)
        elif found is not None: made[key] = _tensor(kernel, key, found, sizes)
        elif each.default is each.empty and each.kind is not each.KEYWORD_ONLY:
            raise RequestError(f"argument {key} of kernel {kernel.label}, whose annotation has no dimensions",
                               f'KTile["N", f32], or a number: --set {key}=…',
                               "call kernel.passes(…) in Python with what it takes")
    if left:
        names = list(dict.fromkeys([*own.symbols, *own.parameters.parameters]))
        raise RequestError(f"{', '.join(left)} of kernel {kernel.label}", f"some of {', '.join(names)}",
                           "leave it out")
    return made


def _tensor(kernel: Kernel, key: str, found: Any, sizes: Mapping[str, Any]) -> Tensor:
    shape = found.shape(sizes)
    if shape is None or found.leading:
        missing = [each for each in found.symbols if each not in sizes]
        raise RequestError(f"the shape of {key}: {found} of kernel {kernel.label}",
                           f"sizes of {', '.join(missing) or 'its leading dimensions'}",
                           " ".join(f"--set {each}=64" for each in missing) or "name them in the annotation")
    if found.element is None:
        raise RequestError(f"{key}: {found} of kernel {kernel.label} has no dtype", f"{found.kind}[…, f32]",
                           "add the dtype to the annotation")
    return Tensor.empty(*shape, dtype=found.element, device="CPU")
