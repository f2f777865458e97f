"""The one table of templates: which module has a family's, by kind of target."""
from tinygrad_nv.tile.template import Table

TABLE = Table({
    ("gpu", "gemm"): "tinygrad_nv.tile.gemm.templates",
    ("gpu", "norm"): "tinygrad_nv.tile.norm.templates",
    ("gpu", "kv_append"): "tinygrad_nv.tile.kv_append.templates",
    ("gpu", "embedding"): "tinygrad_nv.tile.embedding.templates",
    ("gpu", "sampling"): "tinygrad_nv.tile.sampling.templates",
    ("cpu", "gemm"): "tinygrad_nv.cpu.gemm.templates",
    ("cpu", "attention"): "tinygrad_nv.cpu.attention.templates",
    ("cpu", "decode"): "tinygrad_nv.cpu.decode.templates",
    ("cpu", "norm"): "tinygrad_nv.cpu.norm.templates",
    ("cpu", "kv_append"): "tinygrad_nv.cpu.kv_append.templates",
    ("cpu", "embedding"): "tinygrad_nv.cpu.embedding.templates",
    ("cpu", "sampling"): "tinygrad_nv.cpu.sampling.templates",
})
