"""The one table of templates: which module has a family's, by kind of target."""
from tinygrad_nv.tile.template import Table

TABLE = Table({
    **{("gpu", family): f"tinygrad_nv.tile.{family}.templates" for family in ("gemm", "attention", "decode")},
    **{("cpu", family): f"tinygrad_nv.cpu.{family}.templates" for family in (
        "gemm", "attention", "decode", "norm", "kv_append", "embedding", "sampling")}})
