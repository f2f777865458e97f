"""vLLM's endpoints for serving in parts (`--enable-scale-out`): prompts are rendered, run and read apart.

A router renders a request to token ids on one server, has them run on another, and the answer's token ids
become the answer of the first request again. In reading order:

    generating.py     /inference/v1/generate, /inference/v1/abort_requests
    rendering.py      …/render: from requests to those of /inference/v1/generate
    derendering.py    …/derender: from its answers to those of the first request
"""
