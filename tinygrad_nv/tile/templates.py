"""The one table of templates: the family of a type of spec, and on which kinds of target there is one.

A type lies in its family's folder of tile/; `templates.py` of the family's folder of tile/ (GPUs) or cpu/, or
the family's module where it is one file, has the templates, and is imported when a spec of one of its types
is first asked for.
"""
from tinygrad_nv.tile.template import Table

# family: the names of its types of specs
SPECS = {"gemm": "GemmSpec",
         "attention": "AttentionSpec BackwardSpec",
         "decode": "DecodeSpec",
         "norm": "NormSpec",
         "column_sum": "ColumnSumSpec",
         "kv_append": "AppendSpec",
         "embedding": "EmbeddingSpec EmbeddingGradientSpec",
         "sampling": "FilterSpec ChoiceSpec CountSpec",
         "quant_gemm": "QuantGemmSpec",
         "lora": "LoraShrinkSpec LoraExpandSpec",
         "cross_entropy": "CrossEntropySpec DistillationSpec",
         "optimizer": "AdamWSpec SquaresSpec",
         "rope": "RopeSpec RopeGradientSpec",
         "conv": "ConvSpec",
         "group_norm": "GroupNormSpec",
         "scaled_gemm": "ScaledGemmSpec",
         "sparse_gemm": "SparseGemmSpec",
         "router": "RouterSpec GroupRowsSpec",
         "grouped_gemm": "GroupedGemmSpec ScaledGroupedGemmSpec TransposedGroupedSpec MixedGroupedSpec "
                         "GroupedOuterSpec",
         "quant_grouped": "QuantGroupedSpec",
         "linear_attention": "LinearAttentionSpec",
         "causal_conv": "CausalConvSpec", "selective_scan": "SelectiveScanSpec",
         "all_reduce": "AllReduceSpec"}
FOLDERS = {"gpu": "tile", "cpu": "cpu"}
ONLY_GPU = ("scaled_gemm", "sparse_gemm", "all_reduce")
# programs of the tile language, one for GPUs and CPUs
PROGRAMS = ("norm", "rope", "column_sum", "cross_entropy", "optimizer", "router", "group_norm",
            "kv_append", "embedding", "sampling", "linear_attention", "causal_conv", "selective_scan")
TABLE = Table({name: family for family, names in SPECS.items() for name in names.split()},
              {(kind, family): f"tinygrad_nv.tile.{family}.program"
               if family in PROGRAMS else f"tinygrad_nv.{folder}.{family}"
               for kind, folder in FOLDERS.items() for family in SPECS
               if kind == "gpu" or family not in ONLY_GPU})
