"""Several devices and processes: ranks, what they say to each other, and how a fault in one ends all.

  ranks.py                  which rank this process is
  store.py                  small values between ranks; rendezvous.py, store_server.py, frames.py behind it
  watchdog.py               ends ranks that hang, differ, or are lost
  launcher.py               starts ranks; processes.py ends them together, cores.py shares the cores
  group.py                  groups of ranks, `init()` and `world()`
  collectives/              functions of Tensors: all_reduce, reduce_scatter, all_gather, all_to_all, ...
  mesh/                     devices with named axes, and layouts of tensors over them
  train/                    what a step of training over ranks is made of
  transports/, csrc/        what carries the bytes: shared memory, MPI

Nothing here is imported by a program of one device. Ranks, stores and launchers import no tinygrad.
"""
