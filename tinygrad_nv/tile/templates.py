"""The one table of templates: which module has a family's, by kind of target."""
from tinygrad_nv.tile.template import Table

BOTH = ("gemm", "attention", "decode", "norm", "column_sum", "kv_append", "embedding", "sampling",
        "quant_gemm", "lora", "cross_entropy", "optimizer", "rope", "conv", "group_norm")
FAMILIES = {"gpu": (*BOTH, "scaled_gemm", "sparse_gemm", "router", "grouped_gemm", "quant_grouped",
                    "all_reduce"),
            "cpu": (*BOTH, "router", "grouped_gemm", "quant_grouped")}
FOLDERS = {"gpu": "tile", "cpu": "cpu"}
TABLE = Table({(kind, family): f"tinygrad_nv.{FOLDERS[kind]}.{family}.templates"
               for kind, families in FAMILIES.items() for family in families})
