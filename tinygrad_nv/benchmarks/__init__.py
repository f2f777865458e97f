"""`tinygrad-nv bench`: workloads, metrics, peers.

  workload.py  which requests a benchmark sends, and when: from a seed, equal for every engine
  engines.py   models in this process: tinygrad_nv, and peers that get the same requests
  client.py    load on a server of OpenAI's API: streamed completions, timed as they arrive
  figures.py   metrics under vLLM's names, as text and as JSON
"""
