"""OpenAI's HTTP API over an engine.

Read in this order:

  errors.py       the errors that a client sees
  fields.py       strict JSON, and typed fields of an object
  protocol.py     requests: JSON objects to typed ones; structure.py has structured output, tools.py tools
                  and the tool calls in a model's text
  service.py      what endpoints share: the generation of a request; record.py, its log record
  sse.py          streams, and clients that disconnect
  completions.py  POST /v1/completions
  chat.py         POST /v1/chat/completions
  metrics.py      /metrics, for Prometheus
  log.py          log lines
  app.py          routes, keys, and errors in OpenAI's shape
  limits.py       limits of one client
  serving.py      uvicorn with these limits, and the drain
  startup.py      from the command line to a server that answers
  waterfall.py    where the time of a start goes
  page/           the chat page, and the engine's state
"""
