"""From prompts to texts, many at a time.

  llm.py             `LLM`: a model directory, ready to generate; opening.py and fit.py, before it is loaded
  async_engine.py    `AsyncEngine`: the same for many callers of an asyncio loop
  sampling.py        `SamplingParams`: what a user may ask of the sampler
  outputs.py         tokens and texts of requests while they run

A request's way (docs/engine.md):

  thread.py          the core at work in a thread of its own
  core.py            the loop: schedule, launch, look at what the last step chose
  engine_config.py   how much at a time
  scheduling/        requests, and which of their tokens each step computes
  speculation/       draft tokens
  structured_output/ token masks of schemas, regular expressions and grammars
  running/           steps on the device: captured graphs over pages, the sampler
  text/              tokenizer, detokenizer, stop strings
"""
