"""OpenAI's HTTP API, Anthropic's, Ollama's and llama.cpp's, over an engine.

Read in this order:
  errors.py       error responses
  fields.py       strict JSON, and typed access to its fields
  protocol.py     requests of completions: JSON objects to typed ones
  chat_protocol.py  requests of conversations (with structured_output.py: structured output, and tools.py:
                  tools and tool choice)
  parsers/        reasoning and tool calls in a model's text
  service.py      what endpoints share: the generation of one request; record.py, its record
  conversation.py  what endpoints of conversations share: from the chat template to parsed answers
                   (with conversation_images.py: images among their parts)
  sse.py          streams, and client disconnects
  completions.py  POST /v1/completions
  chat.py         POST /v1/chat/completions
  responses.py    POST /v1/responses (with responses_request.py: requests, past_calls.py: calls of tools that
                  are no functions, response_events.py: the response and its events, response_store.py: those
                  that are kept)
  messages.py     POST /v1/messages (with messages_request.py: requests)
  ollama.py       Ollama's API: POST /api/chat, … (with ollama_request.py: requests)
  llama_cpp.py    llama.cpp's: POST /completion, GET /props
  embeddings.py   POST /v1/embeddings
  images.py       POST /v1/images/generations
  transcriptions.py  POST /v1/audio/transcriptions, /v1/audio/translations (with transcription_request.py:
                  forms)
  metrics.py      Prometheus metrics
  log.py          log lines
  app.py          routes, API keys, and OpenAI-style responses for every error
  media_budget.py memory of images and recordings that are being decoded, of all requests
  limits.py       sizes and timeouts that protect the server from a client
  serving.py      uvicorn with these limits, and a graceful shutdown
  startup.py      from the command line to a listening server; speech_startup.py, of one that transcribes
  page/           a web page to chat with the model and to watch the server; page.js puts its modules together
"""
