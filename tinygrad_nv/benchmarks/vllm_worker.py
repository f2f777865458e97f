"""vLLM's `LLM` behind a pipe: the program that `VLLM` of engines.py runs in an interpreter with vLLM, which
needs nothing of this package.

    python vllm_worker.py DIRECTORY DTYPE

It writes a line once the model is loaded. Each line it reads is a JSON list of (token ids, number of tokens
to decode); each line it writes has the seconds of all of them together, and how many tokens each gave.
"""
from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module


def main() -> None:
    """Answers lines until there are no more."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)                                      # vLLM logs on stdout
    vllm = import_module("vllm")
    llm = vllm.LLM(model=sys.argv[1], dtype=sys.argv[2], skip_tokenizer_init=True)
    print(json.dumps({"loaded": sys.argv[1]}), file=answers)
    for line in sys.stdin:
        work = json.loads(line)
        params = [vllm.SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
                  for _, output in work]
        started = time.perf_counter()
        done = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in work], params, use_tqdm=False)
        seconds = time.perf_counter() - started
        print(json.dumps({"seconds": seconds, "lengths": [len(each.outputs[0].token_ids) for each in done]}),
              file=answers)


if __name__ == "__main__": main()
