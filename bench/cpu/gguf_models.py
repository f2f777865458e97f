"""GGUF files for benches: the model in the box and random ones (cpu/decode.py) in formats of llama.cpp.

    python bench/cpu/gguf_models.py 37M 38M --formats q4_0 q4_K_M q8_0 --out FOLDER [--peer PYTHON]

Writes FOLDER/MODEL-FORMAT.gguf without a tokenizer: ids go in and come out; and FOLDER/MODEL, the directory
that cpu/gguf_decode.py runs in transformers. llama.cpp quantises a file of float16, so that a format is what
llama.cpp makes of it: q4_K_M has q6_K for some matrices, and q5_0 and q8_0 for those whose rows are no
multiple of 256. The types of each file are printed. `--peer` is the Python that has llama-cpp-python
(gguf_peer.py); this one needs gguf and torch.
"""
from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.cpu.decode import MODELS, model_directory
from bench.cpu.gguf_decode import types_of
from bench.cpu.gguf_writer import write

FORMATS = ("q4_0", "q4_K_M", "q8_0")


def main() -> None:
    """Writes the files that are not there."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="+", choices=list(MODELS))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--peer", default=sys.executable, metavar="PYTHON", help="with llama-cpp-python")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    peer = Path(__file__).with_name("gguf_peer.py")
    for model in arguments.models:
        source = arguments.out / f"{model}-f16.gguf"
        if not source.exists():
            with model_directory(model) as directory:
                write(directory, source, "float16")
                shutil.copytree(directory, arguments.out / model, dirs_exist_ok=True)
        for format in arguments.formats:
            path = arguments.out / f"{model}-{format}.gguf"
            if not path.exists():
                subprocess.run([arguments.peer, peer, "quantise", source, path, format], check=True)
            print(f"{path.name}: {types_of(path)}")


if __name__ == "__main__": main()
