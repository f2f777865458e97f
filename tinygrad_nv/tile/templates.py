"""The one table of templates: which module has a family's, by kind of target."""
from tinygrad_nv.tile.template import Table

TABLE = Table({("gpu", "gemm"): "tinygrad_nv.tile.gemm.templates"})
