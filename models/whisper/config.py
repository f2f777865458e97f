"""config.json of a Whisper model, checked, as one frozen `WhisperConfig`.

Protocol: `read_whisper_config(directory)` is None for a directory of another architecture. Every field that
changes what is computed is either implemented or refused by name. (scale_embedding changes nothing in
transformers' network, and nothing here.)
"""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tinygrad_nv.errors import ModelError, brief, shorten
from tinygrad_nv.kvcache.shape import KVShape

from ..config import config_dtype, read_json
from ..fields import CORRECT, Fields

ARCHITECTURE = "WhisperForConditionalGeneration"
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish")
# what transformers' class fills in
DEFAULTS = {"vocab_size": 51865, "num_mel_bins": 80, "encoder_layers": 4, "encoder_attention_heads": 6,
            "decoder_layers": 4, "decoder_attention_heads": 6, "decoder_ffn_dim": 1536,
            "encoder_ffn_dim": 1536, "activation_function": "gelu", "d_model": 384,
            "max_source_positions": 1500, "max_target_positions": 448, "decoder_start_token_id": 50257,
            "tie_word_embeddings": True}


@dataclass(frozen=True)
class StackConfig:
    """One of the two stacks of layers."""
    layers: int
    heads: int
    ffn_width: int


@dataclass(frozen=True)
class DecoderPages:
    """Sizes that a paged cache asks of a model: its self-attention, or its cross-attention, which has as many
    layers and heads."""
    num_layers: int
    kv_shape: KVShape


@dataclass(frozen=True)
class WhisperConfig:
    """`frames` of the spectrogram make a window, of which the encoder's convolutions leave half: `positions`.
    A sequence has at most `max_tokens`, the prompt included. `dtype` is config.json's, None where it names
    none."""
    vocab_size: int
    mels: int
    hidden_size: int
    encoder: StackConfig
    decoder: StackConfig
    positions: int
    max_tokens: int
    activation: str
    tied: bool
    start_token: int
    dtype: str | None

    @property
    def frames(self) -> int:
        """Frames of a window: 3000, which are 30 s."""
        return 2 * self.positions

    @property
    def pages(self) -> DecoderPages:
        """Keys and values of the decoder's layers."""
        heads = self.decoder.heads
        width = self.hidden_size // heads
        return DecoderPages(self.decoder.layers, KVShape(heads, width, width))


def is_whisper(directory: Path) -> bool:
    """Whether a directory is of a Whisper model."""
    path = directory / "config.json"
    if not path.is_file(): return False
    data = read_json(path)
    listed = data.get("architectures")
    return data.get("model_type") == "whisper" or (isinstance(listed, list) and ARCHITECTURE in listed)


def read_whisper_config(directory: Path) -> WhisperConfig | None:
    """The config of a Whisper model; None of another architecture. Raises `ModelError`."""
    if not is_whisper(directory): return None
    path = directory / "config.json"
    f = Fields({**DEFAULTS, **read_json(path)}, str(path))
    listed = f.get("architectures") or [ARCHITECTURE]
    if not isinstance(listed, list) or ARCHITECTURE not in listed:
        found = ", ".join(map(str, listed)) if isinstance(listed, list) else str(listed)
        raise ModelError(f"{path}: the architecture is {shorten(found)}", ARCHITECTURE,
                         "use a model for transcription")
    hidden = f.positive("d_model")
    encoder, decoder = (_stack(f, name, hidden) for name in ("encoder", "decoder"))
    activation = f.one_of("activation_function", ACTIVATIONS, CORRECT)
    vocabulary, start = f.positive("vocab_size"), f.raw["decoder_start_token_id"]
    if type(start) is not int or not 0 <= start < vocabulary:
        raise ModelError(f"{path}: decoder_start_token_id is {brief(start)}",
                         f"a token id below vocab_size, {vocabulary}", CORRECT)
    return WhisperConfig(
        vocabulary, f.positive("num_mel_bins"), hidden, encoder, decoder, f.positive("max_source_positions"),
        f.positive("max_target_positions"), activation, f.flag("tie_word_embeddings"),
        start, config_dtype(f.raw, f.name))


def _stack(f: Fields, name: str, hidden: int) -> StackConfig:
    made = StackConfig(f.positive(f"{name}_layers"), f.positive(f"{name}_attention_heads"),
                       f.positive(f"{name}_ffn_dim"))
    if hidden % made.heads:
        raise ModelError(f"{f.name}: d_model {hidden} with {name}_attention_heads {made.heads}",
                         "a d_model that is a multiple of the heads", CORRECT)
    return made
