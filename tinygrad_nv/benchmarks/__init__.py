"""`tinygrad-nv bench`: workloads, engines, figures.

    workload.py   which prompts, how long, and when they arrive
    engines.py    models in this process: ours, and peers that get the same workload
    speed.py      prefill and decode of one sequence, and what the weights are
    client.py     an OpenAI-compatible server under load
    figures.py    the measured figures, with vLLM's names
"""
