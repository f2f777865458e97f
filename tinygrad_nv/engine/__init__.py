"""From prompts to texts, many at a time.

What is asked, and what comes back:
  sampling.py       what a user may ask of the sampler; structured.py and matcher.py, what form an answer has
  tokenizer.py      text to ids and back, chat templates
  text.py           ids to text while they arrive: incomplete characters and stop strings are held back
  outputs.py        tokens and texts of requests while they run; processor.py makes the latter of the former
  llm.py            `LLM`: a model directory, ready to generate; opening.py and fit.py, before it is loaded
  async_engine.py   `AsyncEngine`: the same for many callers of an asyncio loop
A request's way (docs/engine.md):
  thread.py         the core at work in a thread of its own
  request.py        a request and its sequences; engine_config.py, how much at a time
  scheduler.py      which sequences a step computes, and how much of each
  core.py           the loop: schedule, launch, look at what the last step chose
  speculation.py    guesses of the next tokens; draft_model.py, those of a smaller model
  batch.py          a step in words
  runner.py         a step on the device: its words, graphs, pages, results (runner_*.py), and sampler.py
"""
