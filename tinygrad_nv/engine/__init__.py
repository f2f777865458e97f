"""The serving engine: requests in, streams of text out, continuous batching in between.

  llm.py             `LLM`: a loaded model directory; loading.py and memory_planning.py run before the load
  async_engine.py    `AsyncEngine`: the same engine for many callers of one asyncio loop
  sampling.py        `SamplingParams`; generation_config.py has a model's defaults
  embedding/         embedding models: `LLM.embed`
  speech/            Whisper: `Transcriber`
  vision/            images in prompts
  prompts.py         prompts: a text or token ids
  outputs.py         tokens and text of a request while it runs

The path of a request (docs/engine.md):

  thread.py          runs the core in its own thread
  core.py            the loop: schedule, launch, process the output of the previous step
  engine_config.py   limits: sequences, token budget, context
  scheduling/        requests, and the scheduler: running and waiting queues, preemption
  speculation/       speculative decoding: proposers of draft tokens
  structured_output/ token masks of JSON schemas, regular expressions and grammars
  worker/            the model runner: steps on the device, captured graphs over pages, the sampler
  text/              tokenizer, detokenizer, stop strings
"""
