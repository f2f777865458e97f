"""Several devices and processes: starting ranks, collectives between them, and plans for clusters.

  ranks.py                  which rank this process is, by its environment
  store.py                  small values between ranks; rendezvous.py, store_server.py, frames.py behind it
  watchdog.py               ends all ranks when one hangs, is lost, or calls another collective
  launcher.py               starts ranks; processes.py ends them together, cores.py shares the cores
  group.py                  groups of ranks, `init()` and `world()`
  collectives/              functions of Tensors: all_reduce, reduce_scatter, all_gather, all_to_all, ...
  mesh/                     devices with named axes, and layouts of tensors over them
  train/                    training over ranks: data parallel, ZeRO, FSDP, pipelines, experts, long sequences
  transports/, csrc/        how bytes get from rank to rank: shared memory, MPI, NCCL
  plan/                     memory and time of a model over GPUs that are not here

A program of one device imports none of these. Ranks, stores and launchers import no tinygrad.
"""
