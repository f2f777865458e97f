"""`tinygrad-nv bench`: loads, figures, peers.

    workload.py   which prompts, how long, and when they arrive
    engines.py    models in this process: ours, and peers that do the same
    client.py     a server of OpenAI's API under load
    figures.py    vLLM's words for what was measured
"""
