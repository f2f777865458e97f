"""Plans: memory and time of a model over GPUs that are not here. Everything is modelled, nothing measured.

  planning.py                 the plan of one layout: `plan(config, layout, cluster, work)`
  search.py                   plans of all layouts, the fastest first
  layout.py                   layouts and work: types, the reasons why a layout is impossible, and the part
                              of a model that one rank holds
  cluster.py, figures.toml    GPUs, links and networks, each figure with its source
  memory.py                   memory of a device
  compute.py, layer.py        how long kernels take, and which kernels a layer has
  collectives.py              how long a collective takes: an α–β model; those of a step
  inference.py, training.py   the time of a step; how long stages of a pipeline wait, and what they keep
  presets.py, presets.json    public architectures by name
  report.py                   a plan as text and as plain data
"""
