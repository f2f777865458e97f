"""The one table of templates: which module has a family's, by kind of target."""
from tinygrad_nv.tile.template import Table

FAMILIES = "gemm", "attention", "decode", "norm", "kv_append", "embedding", "sampling"
TABLE = Table({(kind, family): f"tinygrad_nv.{folder}.{family}.templates"
               for kind, folder in (("gpu", "tile"), ("cpu", "cpu")) for family in FAMILIES})
