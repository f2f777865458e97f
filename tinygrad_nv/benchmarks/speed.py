"""Prefill and decode of one sequence, as llama-bench has them: prompts alone, then tokens after one token.

Protocol: `measured(llm, …)` gives tokens a second of each repeat, by test: "pp512" (a prompt of 512 tokens,
to its first token) and "tg128" (128 tokens after the first). `describe_weights(llm)` says what the weights
are, and how many bytes of them each token reads: tokens/s times these are the GB/s that memory gives.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import Any

from tinygrad_nv.benchmarks.engines import BenchEngine
from tinygrad_nv.benchmarks.workload import DECODED, PROMPT, random_requests
from tinygrad_nv.errors import RequestError
from tinygrad_nv.models.quantised.layers import matrices
from tinygrad_nv.quant import types
from tinygrad_nv.quant.readers.reader import ONLINE
from tinygrad_nv.quant.sparse import SparseTensor
from tinygrad_nv.quant.types import QType

NAMED = {getattr(types, name).of_rows(): name for name in (
    "MXFP4", "NVFP4", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")}


# **** what the weights are ****

@dataclass(frozen=True)
class Weights:
    """Weights of a loaded model. `method` is config.json's, "" where nothing is quantised; `kinds` are words
    for each type of matrix, how many there are, and their bytes. `streamed` bytes are read by each decode
    step; without quantisation it would be `unquantised`. `experts` is of a mixture of experts."""
    method: str
    kinds: tuple[tuple[str, int, int], ...]
    dtype: str
    streamed: int
    unquantised: int
    experts: Experts | None = None

    def __str__(self) -> str: return self._kinds() + ("" if self.experts is None else f"\n{self.experts}")

    def _kinds(self) -> str:
        read = f"{self.streamed / 1e6:,.1f} MB read for each token"
        if not self.kinds: return f"{self.dtype}, {read}"
        made = ", ".join(f"{count} × {words} ({nbytes / 1e6:,.1f} MB)" for words, count, nbytes in self.kinds)
        return (f"{self.method}: {made}; the rest {self.dtype}; {read}, {self.unquantised / 1e6:,.1f} "
                f"MB in {self.dtype}")

    def record(self) -> dict[str, Any]:
        """For JSON."""
        kinds = [{"type": words, "matrices": count, "bytes": nbytes} for words, count, nbytes in self.kinds]
        made = {"quantization": self.method or None, "dtype": self.dtype, "kinds": kinds,
                "bytes_per_token": self.streamed, "bytes_per_token_unquantized": self.unquantised}
        return made if self.experts is None else {**made, "experts": self.experts.record()}


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: `count` in each of `layers` layers, of which a token has `active`. A decode step
    of `sequences` reads `distinct` of a layer's experts and `streamed` bytes of weights, as expected where
    each expert is as likely as any other. A router that prefers some reads fewer."""
    count: int
    active: int
    layers: int
    sequences: int
    distinct: float
    streamed: int

    def __str__(self) -> str:
        return (f"Experts: {self.active} of {self.count} for each token, in {self.layers} layers; even "
                f"routing reads {self.distinct:.1f} of them for a batch of {self.sequences}, and "
                f"{self.streamed / 1e6:,.1f} MB of weights in all")

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {"experts": self.count, "experts_per_token": self.active, "layers": self.layers,
                "sequences": self.sequences, "expected_distinct_experts": self.distinct,
                "expected_bytes_per_step": self.streamed}


def experts_of(llm: Any, sequences: int) -> Experts | None:
    """Returns the experts of an `LLM`; None if it has no mixture of experts."""
    if (moe := llm.config.moe) is None: return None
    return Experts(moe.experts, moe.policy.k, sum(moe.layers), sequences, moe.distinct(sequences),
                   llm.step_weight_bytes(sequences))


def describe_weights(llm: Any, sequences: int = 1) -> Weights:
    """Returns the weights of an `LLM`, where a step decodes so many sequences."""
    counts, sizes = Counter[str](), Counter[str]()
    for matrix, activations in matrices(llm.model):
        words = f"{NAMES.get(matrix.dtype.name, matrix.dtype.name)} 2:4" if isinstance(matrix, SparseTensor) \
            else type_words(matrix.type)
        if activations is not None: words += f", inputs {activations.element}"
        counts[words] += 1
        sizes[words] += matrix.nbytes
    config = llm.config
    method = "" if config.quantization is None else str(config.quantization["quant_method"])
    if method == ONLINE: method = "quantised while loading"
    unread = 0 if config.tied else config.vocab_size * config.hidden_size
    unread += config.inactive_parameters()
    return Weights(method, tuple((words, count, sizes[words]) for words, count in counts.most_common()),
                   NAMES.get(name := str(llm.dtype).rpartition(".")[2], name), llm.streamed_bytes,
                   (config.parameters - unread) * llm.dtype.itemsize, experts_of(llm, sequences))


NAMES = {"float": "float32", "half": "float16", "__bf16": "bfloat16"}


def type_words(type: QType) -> str:
    """A type as its users name it: int4 g128, e4m3 channel, Q4_K."""
    plain = replace(type, layout="rows", permuted=False)
    if (named := NAMED.get(plain.of_rows())) is not None: return named
    centred = type.shift == 1 << type.bits - 1 and not type.zeros
    made = f"{f'int{type.bits}' if centred else type.element} {type.scale}"
    flags = ("zeros", "zero points"), ("mins", "minima"), ("permuted", "act order")
    return ", ".join([made, *(words for name, words in flags if getattr(type, name))])


# **** how quick it is ****

def lengths(prompt: int | None, decoded: int | None, context: int) -> tuple[int, int]:
    """Tokens of a prompt, and to decode; those not given are llama-bench's, or what the context has. Raises
    `RequestError`."""
    made = tuple(min(usual, context - 2) if asked is None else asked
                 for asked, usual in ((prompt, PROMPT), (decoded, DECODED)))
    if (most := max(made)) + 2 > context:
        raise RequestError(f"{most} tokens, and two beside them", f"at most {context}, the context",
                           "lower --input-len or --output-len, or raise --max-model-len")
    return made[0], made[1]


def measure(llm: Any, prompt: int, decoded: int, repeat: int, seed: int = 0,
             step: Callable[[], None] = lambda: None, peer: BenchEngine | None = None
             ) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Tokens a second, and those of a peer, after one run of each that compiles. A peer's decoding is of all
    its tokens, the first of which takes a prompt of one."""
    from tinygrad_nv.engine.sampling import SamplingParams
    made: dict[str, list[float]] = {f"pp{prompt}": [], f"tg{decoded}": []}
    theirs: dict[str, list[float]] = {name: [] for name in made} if peer else {}
    for number in range(repeat + 1):
        for name, tokens, output in ((f"pp{prompt}", prompt, 1), (f"tg{decoded}", 1, decoded + 1)):
            (one,) = random_requests(1, tokens, output, llm.config.vocab_size, seed + number)
            done = llm.complete(list(one.prompt), SamplingParams(temperature=0.0, max_tokens=output,
                                                                 ignore_eos=True))
            if number: made[name].append(tokens / done.ttft_s if output == 1 else done.tokens_per_s)
            if peer is not None:
                seconds = peer.run([one])
                if number: theirs[name].append((tokens if output == 1 else output) / seconds)
            step()
    return made, theirs


def table(rates: Mapping[str, Sequence[float]], streamed: int) -> str:
    """Tokens a second with their standard deviation, and of decoding GB/s of weights."""
    lines = [f"{'test':<8}{'tokens/s':>24}{'GB/s of weights':>20}"]
    for name, found in rates.items():
        off = stdev(found) if len(found) > 1 else 0.0
        moved = f"{mean(found) * streamed / 1e9:.2f}" if name.startswith("tg") else ""
        lines.append(f"{name:<8}{f'{mean(found):.2f} ± {off:.2f}':>24}{moved:>20}".rstrip())
    return "\n".join(lines)
