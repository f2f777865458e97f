"""The model runner: steps on the device, as captured graphs over pages, and the sampler.

  model_runner.py   `ModelRunner`: runs batches of many sequences as captured steps
  captured_step.py  A step as device graphs, captured once and launched without tinygrad
  warm_up.py        What is captured ahead, and in which order; step_process.py: the fork that captures too
  step_store.py     Captured steps on disk; prebuilt_steps.py: those that come with the bundled model
  input_buffer.py   Shapes of steps, and their inputs, uploaded in one copy
  image_inputs.py   Those of models that read images: rows that stand for tokens, positions
  output_buffer.py  Logits and sampled tokens on the device, and their copy to the host
  kv_cache_dtype.py The dtype of keys and values, and the scales of 8-bit ones
  sampler.py        The sampler as tensor code
  sampler_steps.py  Samplers as captured steps, and token masks, uploaded for them
  logit_rows.py     Whole rows of logits for the host, where ranks have parts of the vocabulary
"""
