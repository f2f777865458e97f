"""Plans past the machine: memory and time of a model over GPUs that are not here. Everything is modelled.

  cluster.py, figures.toml    GPUs, links and networks, each figure with its source
  collectives.py              how long a collective takes: an α–β model
  layout.py                   layouts and work, and what cannot be
  shards.py                   what one rank holds
  pipeline.py, memory.py      schedules; memory of a device
  compute.py, layer.py        how long kernels take; what a layer computes
  uses.py                     collectives of a step, and what hides them
  inference.py, training.py   a step
  planning.py                 a plan of one layout: `plan(config, layout, cluster, work)`
  search.py                   the best of all layouts
  presets.py, presets.json    public architectures by name
  report.py                   a plan as text and as plain data
"""
