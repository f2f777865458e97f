"""`tinygrad-nv bench`: workloads, engines, figures.

    workload.py   which prompts, how long, and when they arrive
    engines.py    models in this process: ours, and peers that get the same workload
    client.py     an OpenAI-compatible server under load
    figures.py    the measured figures, with vLLM's names
"""
