"""`tinygrad-nv image`: a prompt to images, by Stable Diffusion.

Protocol: images are PNG files, whose text `parameters` tells how they were made; of several each has its
number behind the name. A bar counts steps on stderr, where that is a terminal, and a summary follows; stdout
has the one object of --json. What is wrong with options is told before the model is loaded.
"""
from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinygrad_nv.cli.model_path import find_model
from tinygrad_nv.errors import NVError, RequestError
from tinygrad_nv.progress import bar

if TYPE_CHECKING:   # importing these takes a second
    from tinygrad_nv.models.diffusion.pipeline import Generated, ImageParams, StableDiffusion

DTYPES = ("float32", "float16", "bfloat16")


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `image`."""
    command = commands.add_parser("image", help="a prompt to images, with Stable Diffusion",
                                  usage="%(prog)s [options] --model MODEL PROMPT")
    command.add_argument("prompt", metavar="PROMPT", help="what is to be seen")
    command.add_argument("--out", "-o", type=Path, default=Path("image.png"), metavar="FILE",
                         help="the PNG file to write (default image.png)")
    _add_model_options(command)
    image = command.add_argument_group("image")
    image.add_argument("--negative-prompt", metavar="TEXT", help="what is not to be seen")
    image.add_argument("--steps", type=int, default=30, metavar="N", help="steps of denoising (default 30)")
    image.add_argument("--guidance-scale", type=float, metavar="X", help="how closely the prompt is "
                       "followed; 1 is without guidance, in half the time (default 7.5, of XL 5)")
    image.add_argument("--size", type=_size, metavar="WxH", help="in pixels (default: the model's)")
    image.add_argument("--seed", type=int, metavar="N", help="of the first image, the next one's is N + 1 "
                       "(default random; the summary tells it)")
    image.add_argument("--scheduler", metavar="S", help="ddim, euler, dpm++, euler-karras or dpm++-karras "
                       "(default: the model's)")
    image.add_argument("-n", type=int, default=1, metavar="N", help="images (default 1)")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(run=run)


def _add_model_options(command: argparse.ArgumentParser) -> None:
    model = command.add_argument_group("model")
    model.add_argument("--model", "-m", metavar="MODEL", help="a directory as diffusers writes it, or a hub "
                       "name such as stable-diffusion-v1-5/stable-diffusion-v1-5")
    model.add_argument("--dtype", choices=DTYPES, default="float32", help="(default float32)")
    model.add_argument("--tf32", action="store_true", help="matmuls of float32 may take inputs of 19 bits, "
                       "on GPUs (faster)")
    model.add_argument("--device", help="tinygrad's device (default: its choice, or DEV)")
    model.add_argument("--enforce-eager", action="store_true", help="do not capture steps")
    model.add_argument("--vae-tile", type=int, metavar="N", help="decode images of more latents along a side "
                       "in tiles of N, which need less memory")


def _size(text: str) -> tuple[int, int]:
    """Width and height."""
    if (match := re.fullmatch(r"(\d{1,5})[x×](\d{1,5})", text)) is not None:
        return int(match[1]), int(match[2])
    raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512x768")


def run(arguments: argparse.Namespace) -> int:
    """The command. Returns the exit code."""
    from tinygrad_nv.models.diffusion.png import require_pillow
    a = arguments
    if a.model is None:
        raise RequestError("no model is named", "--model with a directory of Stable Diffusion",
                           "hf download stable-diffusion-v1-5/stable-diffusion-v1-5, then add --model")
    if a.out.suffix.lower() != ".png":
        raise RequestError(f"--out is {a.out}", "a name that ends in .png", "change --out")
    if not a.out.resolve().parent.is_dir():
        raise RequestError(f"--out is {a.out}, and there is no directory {a.out.resolve().parent}",
                           "a directory that exists", "create it, or change --out")
    require_pillow()
    params, model = params_of(a), load(a)
    begun = time.perf_counter()
    with bar("denoising") as progress: made = model.generate(a.prompt, params, step=progress)
    took_s = time.perf_counter() - begun
    files = write(a, made)
    if a.json: print(json.dumps({"files": [str(each) for each in files], "seeds": list(made.seeds),
                                 "steps": a.steps, "seconds": round(took_s, 3),
                                 "dropped_tokens": made.dropped, "device": model.device}))
    if made.dropped: print(f"[{made.dropped} tokens of the prompt were cut off]", file=sys.stderr)
    height, width = made.images.shape[1:3]
    print(f"[{', '.join(map(str, files))} · {width}x{height} · {a.steps} steps in {took_s:.1f} s · seed "
          f"{made.seeds[0]} · {model.device}]", file=sys.stderr)
    return 0


def params_of(a: argparse.Namespace) -> ImageParams:
    """Returns the parameters that the command line asks for. Raises `RequestError`."""
    from tinygrad_nv.models.diffusion.pipeline import ImageParams
    from tinygrad_nv.models.diffusion.schedulers import NAMES
    if a.scheduler is not None and a.scheduler not in NAMES:
        raise RequestError(f"the scheduler is {a.scheduler!r}", f"one of: {', '.join(NAMES)}")
    width, height = a.size or (None, None)
    return ImageParams(a.steps, a.guidance_scale, a.negative_prompt, height, width, a.seed, a.scheduler, a.n)


def load(a: argparse.Namespace) -> StableDiffusion:
    """The model of the command line. `--device` becomes tinygrad's default for this process."""
    from tinygrad import dtypes
    from tinygrad.helpers import DEV

    from tinygrad_nv.models.diffusion.pipeline import StableDiffusion
    if a.device:
        try: DEV.value = a.device
        except RuntimeError as error:
            raise RequestError(f"--device {a.device}: {error}", "a device of tinygrad, such as CPU or CUDA",
                               "run `tinygrad-nv doctor` to see what this machine has") from error
    directory = find_model(a.model)
    with bar(f"loading {directory.name}") as progress:
        return StableDiffusion(directory, dtype=getattr(dtypes, a.dtype), graphs=not a.enforce_eager,
                               tf32=a.tf32, tile=a.vae_tile, progress=progress)


def write(a: argparse.Namespace, made: Generated) -> list[Path]:
    """Writes the files; their names."""
    from tinygrad_nv.models.diffusion.png import KEY, png
    count, files = len(made.seeds), []
    for i, (image, seed) in enumerate(zip(made.images, made.seeds, strict=True)):
        path = a.out if count == 1 else a.out.with_stem(f"{a.out.stem}-{i + 1}")
        try: path.write_bytes(png(image, {KEY: json.dumps(describe(a, seed))}))
        except OSError as error:
            raise NVError(f"{path} cannot be written: {error.strerror}", "a directory to write to",
                          "change --out") from error
        files.append(path)
    return files


def describe(a: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Describes how an image was made."""
    return {"prompt": a.prompt, "negative_prompt": a.negative_prompt, "seed": seed, "steps": a.steps,
            "guidance_scale": a.guidance_scale, "scheduler": a.scheduler, "model": Path(a.model).name}
