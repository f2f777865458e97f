"""From a prompt to text, one sequence at a time.

Read in this order:
  sampling.py   what a user may ask of the sampler, and the sampler as tensor code
  tokenizer.py  text to ids and back, chat templates
  text.py       ids to text while they arrive: incomplete characters and stop strings are held back
  decoder.py    the captured prefill and decode steps over one KV cache
  llm.py        `LLM`: a model directory, ready to generate
"""
