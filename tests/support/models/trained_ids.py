"""Makes trained_ids.json: what llama.cpp's tokenizer makes of texts, with the vocabulary of SmolLM2's file.

    python -m tests.support.models.trained_ids

It needs llama-cpp-python, which compiles C++; 0.3.36 made the file.
"""
from __future__ import annotations

import json
from pathlib import Path

from tests.support.models import trained

FILE = Path(__file__).parent / "trained_ids.json"
TEXTS = [
    "", " ", "  ", "\n", "\n\n\n", "\t", " \n \t\n  x", "a", " a", "a ", "a  b   c    d",
    "Hello  world\n\n 123 it's", "The quick brown fox jumps over the lazy dog.",
    "1 12 123 1234567890 3.14159 1,000,000 2024-01-01", "x1y22z333",
    "I'm you're he'll she'd we've IT'S CAN'T o'clock 'quoted'", "don’t “typographic” – dashes — …",
    "été naïve Straße ÅNGSTRÖM ǆ ﬁ", "e\u0301 combining, ñ", "Привет, мир! Γειά σου Κόσμε",
    "你好，世界。これは日本語です。", "한국어 문장", "مرحبا بالعالم", "नमस्ते दुनिया",
    "🙂 👩\u200d👩\u200d👧\u200d👦 🇫🇷 ✂️", "½ ² Ⅷ ٣ ๓ 五", "\xa0nbsp\u2003em\u200bzero\u3000wide",
    "def f(x):\n    return x ** 2  # square\n\n\nclass A:\n\tpass\n",
    '{"key": [1, 2.5e-3, null, true]}', "https://example.com/a?b=c&d=%20#e", "C:\\path\\to\\file.txt",
    "!!! ??? ... ,,, ;;; ((())) [[[]]] <<<>>>", "<|im_start|>user\nHi<|im_end|>\n", "<|endoftext|>",
    "<|im_start |> < |im_end|>",
    "\r\n line \r end\r\n\r\n",
    "AaBbCc XMLHttpRequest snake_case kebab-case", "\x00\x01\x7f�", "a" * 50, " " * 33 + "x", "é" * 20,
    "Once upon a time, in a land far, far away, there lived a princess named 'Aurora' who was 17 years "
    "old.\n"]


def main() -> None:
    """Writes the table: each text with its ids, special tokens parsed, none added."""
    from llama_cpp import Llama
    llm = Llama(str(trained.smollm2()), vocab_only=True, verbose=False)
    rows = [[text, llm.tokenize(text.encode(), add_bos=False, special=True)] for text in TEXTS]
    FILE.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__": main()
