"""Prompts to images: the parts of a directory, and the loop over steps.

Protocol: `StableDiffusion(directory).generate(prompts, ImageParams(…))` encodes prompts and negative prompts,
draws initial latents of the seed, runs the steps of the scheduler's plan, and decodes. A step of all images
is one call: the UNet over each image twice where guidance asks for it, guidance, and the scheduler's update,
whose numbers are inputs. With `graphs` it is captured once for each number and size of images, and replayed.

    m = m_negative + guidance · (m_prompt − m_negative)         arXiv 2207.12598

Image i of a call has the seed `seed` + i, so it does not depend on the others. Not thread-safe.
"""
from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tinygrad import Device, Tensor, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import Context

from tinygrad_nv.errors import ModelError, RequestError, shorten
from tinygrad_nv.graphs.inputs import Input
from tinygrad_nv.graphs.pool import GraphPool

from ..config import read_json
from . import noise, weights
from .clip import TextEncoder
from .config import read_text, read_unet, read_vae
from .schedulers import Plan, plan, read_scheduler
from .tokenizer import TextTokenizer, read_tokenizer
from .unet import UNet
from .vae import VAE, decode_tiles

PIPELINES = {"StableDiffusionPipeline": False, "StableDiffusionXLPipeline": True}
GUIDANCE = {False: 7.5, True: 5.0}      # of 1.5 and 2, and of XL, where none is asked for
DTYPES = (dtypes.float32, dtypes.float16, dtypes.bfloat16)
MOST_SIDE = 4096
SMALLEST_TILE = 4   # latents along a side
NUMBERS = 9     # timestep, scale of the input, six coefficients, guidance
Step = Callable[..., Any]


@dataclass(frozen=True)
class ImageParams:
    """How images are made. None: the model's own size and scheduler, its usual guidance, a seed by chance.
    `guidance_scale` up to 1 is without guidance, so negative prompts do nothing. `n` images of each
    prompt."""
    steps: int = 30
    guidance_scale: float | None = None
    negative_prompt: str | None = None
    height: int | None = None
    width: int | None = None
    seed: int | None = None
    scheduler: str | None = None
    n: int = 1


@dataclass(frozen=True)
class Generated:
    """`images` uint8 (N, H, W, 3), with the seed of each; of prompts that were cut off, how many tokens."""
    images: np.ndarray
    seeds: tuple[int, ...]
    dropped: int


@dataclass(frozen=True)
class Conditions:
    """Conditions of steps: `context` (N, 1 or 2, T, width), negative before positive, and of XL `added`, (N,
    1 or 2, width)."""
    context: np.ndarray
    added: np.ndarray | None


class StableDiffusion:
    """The model in `directory`, as diffusers writes it: Stable Diffusion 1.x, 2.x or XL. `tf32` lets matmuls
    of float32 have inputs of 19 bits on GPUs. `tile`: images of more latents along a side are decoded in
    tiles of so many. `progress(done, total)` is called with bytes that were read. Raises `ModelError`, and
    `RequestError` for tiles that are too small and for other dtypes than float32, float16 and bfloat16."""

    def __init__(self, directory: Path | str, *, dtype: DType = dtypes.float32, device: str | None = None,
                 graphs: bool = True, tf32: bool = False, tile: int | None = None, encodes: bool = False,
                 progress: Callable[[int, int], None] | None = None) -> None:
        self.directory, self.dtype, self.device = Path(directory), dtype, Device.canonicalize(device)
        self.graphs, self.tf32, self.tile = graphs, tf32, tile
        if tile is not None and tile < SMALLEST_TILE:
            raise RequestError(f"tiles of {tile} latents", f"{SMALLEST_TILE} or more along a side")
        if dtype not in DTYPES:
            raise RequestError(f"dtype {dtype!r}", ", ".join(f"dtypes.{each.name}" for each in DTYPES))
        self.xl, self.zero_negative = _read_index(self.directory)
        self.scheduler = read_scheduler(self.directory / "scheduler")
        folders = ("text_encoder", "text_encoder_2") if self.xl else ("text_encoder",)
        self.encoders = [TextEncoder(read_text(self.directory / name), dtype, self.device)
                         for name in folders]
        self.tokenizers = [self._tokenizer(name, encoder) for name, encoder in
                           zip(("tokenizer", "tokenizer_2"), self.encoders, strict=False)]
        self.unet = UNet(read_unet(self.directory / "unet"), dtype, self.device)
        self._check()
        vae = read_vae(self.directory / "vae")
        wide = vae.force_upcast and dtype == dtypes.float16
        self.vae = VAE(vae, dtypes.float32 if wide else dtype, self.device, encodes)
        self._load([*zip(folders, self.encoders, strict=True), ("unet", self.unet), ("vae", self.vae)],
                   progress)
        self._pools: dict[str, tuple[Any, Step]] = {}

    def _tokenizer(self, name: str, encoder: TextEncoder) -> TextTokenizer:
        return read_tokenizer(self.directory / name, encoder.config.max_positions)

    def _check(self) -> None:
        width, added = sum(each.config.hidden_size for each in self.encoders), bool(self.unet.config.added)
        if width == self.unet.config.context and added == self.xl: return
        raise ModelError(f"{self.directory}: text encoders of {width} elements together, "
                         f"{'with' if added else 'without'} time ids",
                         f"the {self.unet.config.context} of the UNet's cross_attention_dim, "
                         f"{'with' if self.xl else 'without'} time ids", "download the directory again")

    def _load(self, networks: Sequence[tuple[str, Any]], progress: Callable[[int, int], None] | None) -> None:
        unread = () if self.vae.encoder is not None else ("encoder.", "quant_conv.")
        for name, network in networks:
            weights.load(network, self.directory / name, unread if name == "vae" else (), progress)

    @property
    def size(self) -> int:
        """Pixels along a side of the images that the model was made for."""
        return self.unet.config.sample_size * self.vae.config.factor

    # **** prompts to images ****

    def generate(self, prompts: str | Sequence[str], params: ImageParams | None = None, *,
                 latents: np.ndarray | None = None,
                 step: Callable[[int, int], None] = lambda done, total: None) -> Generated:
        """`n` images of each prompt. `latents` (N, C, H / 8, W / 8), float32: initial ones instead of the
        seeds'. `step(done, total)` is called before the first step and after each. Raises `RequestError`."""
        params = params or ImageParams()
        if not isinstance(prompts, Sequence):
            raise RequestError(f"prompts of type {type(prompts).__name__}", "a text, or a list of texts")
        given = [prompts] if isinstance(prompts, str) else list(prompts)
        made, seeds, dropped = self.latents(given, params, latents=latents, step=step)
        return Generated(self.decode(made), seeds, dropped)

    def latents(self, prompts: Sequence[str], params: ImageParams, *, latents: np.ndarray | None = None,
                step: Callable[[int, int], None] = lambda done, total: None
                ) -> tuple[np.ndarray, tuple[int, ...], int]:
        """Latents (N, C, H / 8, W / 8) of images, as the VAE decodes them times its scaling; the seeds, and
        how many tokens of prompts were cut off. Raises `RequestError`."""
        height, width, guidance = self.sizes(prompts, params)
        steps = plan(self.scheduler, params.steps, params.scheduler)
        count = len(prompts) * params.n
        seeds = self._seeds(params.seed, count)
        c, factor = self.unet.config.in_channels, self.vae.config.factor
        shape = (c, height // factor, width // factor)
        if latents is not None: latents = np.asarray(latents, np.float32)
        if latents is None: latents = np.stack([noise.normal(seed, (1, *shape))[0] for seed in seeds])
        elif latents.shape != (count, *shape):
            raise RequestError(f"latents of shape {latents.shape}", f"{(count, *shape)}")
        with Context(ALLOW_TF32=int(self.tf32)):
            conditions, dropped = self._conditions(prompts, params, guidance > 1, (height, width))
            made = self._denoise(latents.transpose(0, 2, 3, 1), steps, guidance, conditions, step)
        return np.ascontiguousarray(made.transpose(0, 3, 1, 2)), seeds, dropped

    def sizes(self, prompts: Sequence[str], params: ImageParams) -> tuple[int, int, float]:
        """Height, width and guidance. Raises `RequestError`."""
        if not prompts: raise RequestError("no prompts", "at least one")
        texts = [*prompts, params.negative_prompt or ""]
        if bad := [each for each in texts if not isinstance(each, str) or not _is_unicode(each)]:
            raise RequestError(f"a prompt {bad[0]!r}", "text in Unicode")
        if type(params.n) is not int or params.n < 1: raise RequestError(f"n is {params.n!r}", "1 or more")
        height, width = (self.size if side is None else side for side in (params.height, params.width))
        factor = self.vae.config.factor
        if any(type(side) is not int or side % factor or not factor <= side <= MOST_SIDE
               for side in (height, width)):
            raise RequestError(f"images of {width}x{height}",
                               f"sides that are multiples of {factor}, up to {MOST_SIDE}")
        guidance = GUIDANCE[self.xl] if params.guidance_scale is None else params.guidance_scale
        if not isinstance(guidance, int | float) or not 0 <= guidance <= 100:
            raise RequestError(f"guidance_scale is {guidance!r}", "0 to 100")
        if params.seed is not None and type(params.seed) is not int:
            raise RequestError(f"the seed is {params.seed!r}", "0 to 2^64 − 1")
        return height, width, guidance

    @staticmethod
    def _seeds(seed: int | None, count: int) -> tuple[int, ...]:
        first = secrets.randbelow(1 << 32) if seed is None else seed
        return tuple(first + i for i in range(count))

    # **** conditions ****

    def _conditions(self, prompts: Sequence[str], params: ImageParams, guided: bool,
                    size: tuple[int, int]) -> tuple[Conditions, int]:
        """The conditions of `n` images of each prompt, and how many tokens were cut off."""
        made = [self._encode(prompt) for prompt in prompts]
        dropped = sum(each[2] for each in made)
        context, pooled = np.stack([each[0] for each in made]), np.stack([each[1] for each in made])
        context, pooled = (np.repeat(each[:, None], params.n, 0) for each in (context, pooled))
        if guided:
            text = params.negative_prompt or ""
            zero = params.negative_prompt is None and self.zero_negative
            other, its, _ = self._encode(text)
            if zero: other, its = np.zeros_like(other), np.zeros_like(its)
            def beside(negative: np.ndarray, positive: np.ndarray) -> np.ndarray:
                return np.concatenate([np.broadcast_to(negative, positive.shape), positive], 1)
            context, pooled = beside(other, context), beside(its, pooled)
        return Conditions(context, self._time_inputs(pooled, size) if self.xl else None), dropped

    def _encode(self, text: str) -> tuple[np.ndarray, np.ndarray, int]:
        """A text's states (T, width), its pooled state (of the last encoder), and how many tokens were cut
        off."""
        states, pooled, dropped = [], np.empty(0), 0
        for i, (tokenizer, encoder) in enumerate(zip(self.tokenizers, self.encoders, strict=True)):
            ids, over = tokenizer.encode(text)
            step = self._step(f"text {i}", (), partial(self._text_step, encoder),
                              {"tokens": Input((len(ids),), dtypes.int32)}, 1)
            found = step(tokens=np.asarray([ids], np.int32))
            states.append(found[0].numpy()[0])
            pooled, dropped = found[1].numpy()[0].copy(), max(dropped, over)
        return np.concatenate(states, -1), pooled, dropped

    def _text_step(self, encoder: TextEncoder) -> Step:
        def step(tokens: Tensor) -> tuple[Tensor, Tensor]:
            made = encoder(tokens)
            return (made.penultimate if self.xl else made.last).float(), made.pooled.float()
        return step

    def _time_inputs(self, pooled: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        """Returns the inputs that XL's time embedding adds to, of pooled states (N, S, width): of images that
        were not cropped, original and target sizes as asked for."""
        flat = pooled.reshape(-1, pooled.shape[-1])
        sizes = np.tile(np.asarray([*size, 0, 0, *size], np.float32), (len(flat), 1))
        made = self.unet.make_added_inputs(Tensor(flat, device=self.device),
                                           Tensor(sizes, device=self.device))
        return made.numpy().reshape(*pooled.shape[:2], -1)

    # **** steps ****

    def _denoise(self, latents: np.ndarray, steps: Plan, guidance: float, conditions: Conditions,
                 report: Callable[[int, int], None]) -> np.ndarray:
        """Latents (N, H, W, C) after all steps."""
        count, *row = latents.shape
        numbers = np.concatenate([steps.timesteps[:, None], steps.scales[:, None], steps.coefficients,
                                  np.full((len(steps), 1), guidance)], 1).astype(np.float32)
        given = {"context": conditions.context}
        if conditions.added is not None: given["added"] = conditions.added
        inputs = {"latents": Input(tuple(row), dtypes.float32), "previous": Input(tuple(row), dtypes.float32),
                  "numbers": Input((NUMBERS,), dtypes.float32),
                  **{name: Input(each.shape[1:], dtypes.float32) for name, each in given.items()}}
        key = (count, *row, conditions.context.shape, steps.clip)
        step = self._step("unet", key, lambda: self._unet_step(steps.clip), inputs, count)
        x: Any = (latents * steps.noise).astype(np.float32)
        previous: Any = np.zeros_like(x)
        fixed = {name: Tensor(each, device=self.device).realize() for name, each in given.items()}
        report(0, len(steps))
        for i, each in enumerate(numbers):
            x, previous = step(latents=x, previous=previous, numbers=np.tile(each, (count, 1)), **fixed)
            Device[self.device].synchronize()
            report(i + 1, len(steps))
        return x.numpy().copy()

    def _unet_step(self, clip: float) -> Step:
        def step(latents: Tensor, previous: Tensor, numbers: Tensor, context: Tensor,
                 added: Tensor | None = None) -> tuple[Tensor, Tensor]:
            n, s = context.shape[:2]
            time, scale, p, q, c, d, e, f, guidance = (numbers[:, i].reshape(n, 1, 1, 1)
                                                       for i in range(NUMBERS))

            def each(x: Tensor) -> Tensor:
                """x (N, …) for each of the conditions of an image."""
                return x.unsqueeze(1).expand(n, s, *x.shape[1:]).reshape(n * s, *x.shape[1:]).contiguous()
            made = self.unet(each(latents * scale), each(time.reshape(n)),
                             context.flatten(0, 1).cast(self.dtype).contiguous(),
                             None if added is None else added.flatten(0, 1)).float()
            made = made.reshape(n, s, *made.shape[1:])
            m = made[:, 0] if s == 1 else made[:, 0] + guidance * (made[:, 1] - made[:, 0])
            clean = p * latents + q * m
            if clip: clean = clean.clip(-clip, clip)
            clean = clean.contiguous()
            return c * latents + d * m + e * clean + f * previous, clean
        return step

    # **** images ****

    def decode(self, latents: np.ndarray) -> np.ndarray:
        """Images, uint8 (N, H, W, 3), of latents (N, C, h, w), one after the other."""
        x = (latents.transpose(0, 2, 3, 1) / self.vae.config.scaling).astype(np.float32)
        with Context(ALLOW_TF32=int(self.tf32)): made = np.stack([self._decode(each) for each in x])
        return np.rint((made / 2 + 0.5).clip(0, 1) * 255).astype(np.uint8)

    def _decode(self, latents: np.ndarray) -> np.ndarray:
        """An image (H, W, 3) in −1 … 1."""
        def one(part: np.ndarray) -> np.ndarray:
            step = self._step("vae", part.shape, lambda: lambda x: self.vae.decode(x).float(),
                              {"x": Input(part.shape, dtypes.float32)}, 1)
            made: np.ndarray = step(x=part[None]).numpy()[0].copy()
            return made
        if self.tile is None or max(latents.shape[:2]) <= self.tile: return one(latents)
        return decode_tiles(latents, self.tile, self.vae.config.factor, one)

    # **** captured steps ****

    def _step(self, name: str, key: Any, make: Callable[[], Step], inputs: dict[str, Input],
              rows: int) -> Step:
        """A step that was made by `make`, captured with `graphs`. The one of a name with another key goes."""
        if (found := self._pools.get(name)) is not None and found[0] == key: return found[1]
        self._pools.pop(name, None)
        step = make()
        made: Step = GraphPool(step, inputs, (rows,), self.device) if self.graphs else self._eager(step)
        self._pools[name] = key, made
        return made

    def _eager(self, step: Step) -> Step:
        def call(**given: Any) -> Any:
            made = step(**{name: x if isinstance(x, Tensor) else Tensor(x, device=self.device)
                           for name, x in given.items()})
            return tuple(x.realize() for x in made) if isinstance(made, tuple) else made.realize()
        return call


def _is_unicode(text: str) -> bool:
    """Whether a text has no lone surrogates, as arguments that are not UTF-8 have."""
    try: text.encode()
    except UnicodeEncodeError: return False
    return True


def _read_index(directory: Path) -> tuple[bool, bool]:
    """Whether a directory is XL's, and whether no negative prompt is zeros there. Raises `ModelError`."""
    path = directory / "model_index.json"
    if not path.is_file():
        raise ModelError(f"{directory} has no model_index.json", "a diffusers directory of Stable Diffusion",
                         "check the path; models are not downloaded")
    data = read_json(path)
    if not isinstance(kind := data.get("_class_name"), str) or kind not in PIPELINES:
        raise ModelError(f"{path}: a {shorten(str(kind))}", " or ".join(PIPELINES), "choose another model")
    xl = PIPELINES[kind]
    return xl, xl and bool(data.get("force_zeros_for_empty_prompt", True))
