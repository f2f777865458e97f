"""OpenAI's HTTP API over an engine.

Read in this order:
  errors.py       what a client is told when something is wrong
  fields.py       strict JSON, and fields read out of it with their types
  protocol.py     requests: JSON objects into typed ones (with structure.py: the form of answers, and
                  tools.py: tools, and calls in a model's text)
  service.py      what endpoints share: one request's generation; record.py: what is told of it
  sse.py          streams, and clients that go away
  completions.py  POST /v1/completions
  chat.py         POST /v1/chat/completions
  metrics.py      what Prometheus reads
  log.py          log lines
  app.py          routes, keys, and an answer of OpenAI's shape whatever happens
  limits.py       what one client may take of the server
  serving.py      uvicorn with our limits and our way to stop
  startup.py      from a command line to a server that answers
  waterfall.py    where the time of a start goes
  page/           a page to chat with the model and to watch it
"""
