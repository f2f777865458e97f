"""The inference engine: from prompts to texts, many at a time.

  llm.py           `LLM`: a model directory, ready to generate; opening.py and fit.py run before it is
                   loaded
  async_engine.py  `AsyncEngine`: an LLM for many callers of an asyncio loop
  sampling.py      `SamplingParams`
  outputs.py       tokens and texts of requests while they run

The way of a request (docs/engine.md):

  thread.py           the core in a thread of its own
  core.py             the loop: schedule, launch, read the result of the step before
  engine_config.py    limits
  scheduling/         requests, and which of their tokens each step computes
  speculation/        draft tokens
  structured_output/  token masks of schemas, regular expressions and grammars
  running/            steps on the device: captured graphs over pages, the sampler
  text/               tokenizer, detokenizer, stop strings
"""
