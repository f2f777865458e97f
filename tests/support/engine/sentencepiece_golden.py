"""Writes sentencepiece_golden.json: small models that SentencePiece trained, texts, and its ids of them.

    pip install sentencepiece && python tests/support/engine/sentencepiece_golden.py
"""
from __future__ import annotations

import base64
import io
import json
import random
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("sentencepiece_golden.json")
ROOT = Path(__file__).parents[3]
BPE = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
       "allow_whitespace_only_pieces": True, "split_digits": True}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**BPE, "vocab_size": 460, "remove_extra_whitespaces": False},
    "gemma": {**BPE, "vocab_size": 460, "remove_extra_whitespaces": False, "add_dummy_prefix": False,
              "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3,
              "user_defined_symbols": ["<start_of_turn>", "<end_of_turn>", "\n\n", "▁▁", "▁▁▁"]},
    "t5": {"model_type": "unigram", "vocab_size": 220, "normalization_rule_tsv": "RULES", "pad_id": 0,
           "eos_id": 1, "unk_id": 2, "bos_id": -1},
    "unigram": {"model_type": "unigram", "vocab_size": 420, "byte_fallback": True,
                "normalization_rule_name": "identity", "user_defined_symbols": ["<sep>", "foo bar"]}}
RULES = "FF21\t41\nE9\t65\n9\t20\nA\t20\n2460\t28 31 29\n"
CHARACTERS = "ab e  ▁\n\t-=.xyz0123é你🙂Ａ①"


def text_of(rng: random.Random, corpus: str) -> str:
    """A random text."""
    kind, at = rng.random(), rng.randrange(len(corpus) - 60)
    if kind < 0.4: return "".join(rng.choice(CHARACTERS) for _ in range(rng.randrange(20)))
    if kind < 0.7: return corpus[at:at + rng.randrange(60)]
    if kind < 0.9: return "".join(chr(rng.randint(1, 0x2ff)) for _ in range(rng.randrange(12)))
    return rng.choice([" ", "  a", "a  b ", "\n\n", "foo bar baz", "<sep>a<sep>", "---- --", "aaaaaaa",
                       "   x    y", "<start_of_turn>user\n", "▁▁▁▁▁", "\x00a"]) * rng.randint(1, 3)


def main() -> None:
    """Trains, encodes and writes."""
    import sentencepiece
    corpus, out, rng = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), {}, random.Random(0)
    rules = Path("/tmp/sentencepiece_rules.tsv")
    rules.write_text(RULES)
    for name, options in MODELS.items():
        given, written = {**options}, io.BytesIO()
        if "normalization_rule_tsv" in given: given["normalization_rule_tsv"] = str(rules)
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(corpus.split("\n")), model_writer=written, minloglevel=2,
            character_coverage=0.995, num_threads=1, **given)
        encoder = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
        control = [encoder.id_to_piece(i) for i in range(len(encoder)) if encoder.is_control(i)]
        texts = ["", *(text_of(rng, corpus) for _ in range(110))]
        cases = [(text, encoder.encode(text), encoder.decode(encoder.encode(text))) for text in texts
                 if not any(each in text for each in control)]
        out[name] = {"model": base64.b64encode(written.getvalue()).decode(), "cases": cases}
    FILE.write_text(json.dumps(out) + "\n")


if __name__ == "__main__": main()
