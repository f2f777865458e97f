"""Models of one result for a text: which directories are such, and the network with its pooling.

Protocol: `read_embedding_config(directory, task)` is None for a model that generates text. Embedding models
are the encoders of families/encoder.py, and decoders that have sentence-transformers' modules.json, or whose
architecture is without a head (MistralModel); task "embed" makes one of any decoder. Models for sequence
classification (cross-encoders, rerankers) have a `classifier` beside it. `EmbeddingModel` holds the network;
calling it gives the pooled hidden states of a packed batch, or all of them.
"""
from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tinygrad import Tensor
from tinygrad.dtype import DType

from tinygrad_nv.errors import ModelError, RequestError, brief

from . import encoder_weights, weights
from .checkpoint import open_checkpoint
from .classifier import Classifier, read_classifier
from .config import ModelConfig, parse_config, read_config, read_json
from .encoder import Encoder
from .encoder_config import EncoderConfig, read_encoder_config
from .families import EMBEDDERS
from .families.encoder import DECODER_HEAD, ENCODERS
from .fit import decoder_sizes, require_sizes
from .llama import Llama
from .model_types import architectures_of
from .multimodal import language_entries
from .paged import PackedBatch
from .pooling import Pooling, default_pooling, pool, read_pooling
from .rope import default_context

TASKS = ("auto", "generate", "embed", "classify", "score", "reward")
OF_HEADS = ("classify", "reward")
CLASSIFIES = "ForSequenceClassification"


@dataclass(frozen=True)
class EmbeddingConfig:
    """Configuration of an embedding model: its network, and what is made of hidden states."""
    network: EncoderConfig | ModelConfig
    pooling: Pooling
    classifier: Classifier | None = None

    @property
    def has_types(self) -> bool:
        """Whether tokens of the second of two texts have a type of their own."""
        network = self.network
        return self.classifier is not None and isinstance(network, EncoderConfig) and network.token_types > 1

    @property
    def max_tokens(self) -> int:
        """Most tokens of a text, special tokens included."""
        return min(self.network.max_positions, self.pooling.max_tokens or self.network.max_positions)

    @property
    def default_tokens(self) -> int:
        """Tokens of a text where no --max-model-len is given."""
        return min(self.max_tokens, default_context(self.network.distinct_ropes))

    @property
    def width(self) -> int:
        """Elements of an embedding."""
        return self.pooling.width(self.network.hidden_size)


def read_embedding_config(directory: Path, task: str = "auto") -> EmbeddingConfig | None:
    """The config of an embedding model, None of a model that generates. Raises `ModelError` for a task that
    the model does not have, `RequestError` for one that there is not."""
    if task not in TASKS: raise RequestError(f"the task is {task!r}", f"one of: {', '.join(TASKS)}")
    encoder = read_encoder_config(directory)
    if task == "generate":
        if encoder is None: return None
        raise ModelError(f"{directory} is an encoder ({encoder.architecture}), which generates no text",
                         "a causal language model",
                         "serve it for /v1/embeddings, or call LLM(directory).embed(texts)")
    pooling = read_pooling(directory)
    if encoder is not None:
        if encoder.architecture.endswith(CLASSIFIES): return _classifying(directory, encoder)
        if task in OF_HEADS: raise _no_classifier(directory, encoder.architecture)
        if pooling is not None: pooling.require_fitting(encoder.hidden_size, str(directory))
        return EmbeddingConfig(encoder, pooling or default_pooling(False))
    decoder, classifies = _headless(directory)
    if decoder is None:
        if task == "auto" and pooling is None: return None
        decoder = read_config(directory, embeds=True)
    for name, there in (("multi-head latent attention", decoder.latent is not None),
                        ("attention sinks", decoder.sinks), ("windows in chunks", decoder.chunked),
                        ("layers that keep states", decoder.has_states)):
        if there:
            raise ModelError(f"{directory} has {name} ({decoder.architecture}), whose embeddings are not "
                             "computed yet", "an encoder, or a decoder with plain attention",
                             "choose another embedding model")
    # no logits are computed: the head is not read, but for that of a GGUF file, whose blocks may be shared
    if (decoder.quantization or {}).get("quant_method") != "gguf": decoder = replace(decoder, tied=True)
    if classifies:
        data = read_json(directory / "config.json")
        made = read_classifier(directory, data, DECODER_HEAD, (), decoder.hidden_size)
        return EmbeddingConfig(decoder, Pooling("last", normalize=False), made)
    if task in OF_HEADS: raise _no_classifier(directory, decoder.architecture)
    if pooling is not None: pooling.require_fitting(decoder.hidden_size, str(directory))
    return EmbeddingConfig(decoder, pooling or default_pooling(True, decoder.causal))


def _classifying(directory: Path, encoder: EncoderConfig) -> EmbeddingConfig:
    """The config of an encoder with a head for classification."""
    family, data = ENCODERS[encoder.architecture], read_json(directory / "config.json")
    kind = data.get(family.pooling_field) or "cls"
    if kind not in ("cls", "mean"):
        raise ModelError(f"{directory}: {family.pooling_field} is {brief(kind)}, which is not implemented",
                         "cls or mean", "choose another model")
    made = read_classifier(directory, data, family.head, encoder.names.prefixes, encoder.hidden_size)
    return EmbeddingConfig(encoder, Pooling(kind, normalize=False), made)


def _no_classifier(directory: Path, architecture: str) -> ModelError:
    return ModelError(f"{directory} has no head for classification ({architecture})",
                      f"an architecture …{CLASSIFIES}", "use a classifier, or a reranker")


def _headless(directory: Path) -> tuple[ModelConfig | None, bool]:
    """The config of a decoder that is saved without its head, and whether it has one for classification."""
    path = directory / "config.json"
    if not os.path.isfile(path): return None, False
    data = read_json(path)
    for each in architectures_of(data):
        if each in EMBEDDERS:
            return parse_config(data, str(path), EMBEDDERS[each], embeds=True), each.endswith(CLASSIFIES)
    return None, False


def require_fitting(config: EmbeddingConfig, directory: Path) -> None:
    """Raises `WeightError` where headers have other sizes than config.json."""
    if isinstance(network := config.network, EncoderConfig):
        encoder_weights.require_encoder_sizes(network, directory)
    else:
        entries = language_entries(open_checkpoint(directory).entries, network.names.spell)
        require_sizes(decoder_sizes(network), entries, directory)


class EmbeddingModel:
    """The network. Parameters are allocated, not set: `load` fills them. Texts have at most `length`
    tokens."""

    def __init__(self, config: EmbeddingConfig, dtype: DType, device: str, length: int) -> None:
        self.config, self.dtype, self.device, self.length = config, dtype, device, length
        self.network: Encoder | Llama
        if isinstance(config.network, EncoderConfig):
            self.network = Encoder(config.network, dtype, device, length)
        else: self.network = Llama(config.network, dtype, device, positions=length)

    def load(self, directory: Path, progress: Callable[[int, int], None] | None = None) -> int:
        """Fills every parameter; returns bytes read. Raises `WeightError`."""
        if isinstance(self.network, Encoder): return encoder_weights.load(self.network, directory, progress)
        made = weights.load(self.network, directory, progress, headless=True)
        _ = self.network.rope_tables    # inside a captured step every replay would compute them
        return made

    def positions(self, tokens: np.ndarray) -> np.ndarray:
        """Positions of the tokens of one text."""
        network = self.config.network
        if not isinstance(network, EncoderConfig): return np.arange(len(tokens), dtype=np.int32)
        if network.padding_id is None: return np.arange(len(tokens), dtype=np.int32) + network.first_position
        counted = tokens != network.padding_id
        return (np.cumsum(counted) * counted + network.padding_id).astype(np.int32)

    def __call__(self, tokens: Tensor, positions: Tensor, starts: Tensor, longest: int,
                 types: Tensor | None = None, every: bool = False) -> Tensor:
        """float32 (sequences, hidden): pooled hidden states of tokens (T,) of sequences that begin at
        `starts`; with `every` (T, hidden): those of all tokens. `types`: of tokens, if the config is
        `has_types`."""
        if isinstance(self.network, Encoder):
            batch = self.network.batch(starts, positions, longest)
            hidden = self.network(tokens, batch, types)
        else:
            batch = PackedBatch.of(starts, positions, longest, self.network.rope_tables,
                                   self.network.config.causal)
            hidden = self.network.states_of_packed(tokens, batch)
        if every: return hidden.float()
        return pool(self.config.pooling.kind, hidden.contiguous(), batch)
