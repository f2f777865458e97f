"""Functions of ops, by subject: what tinygrad lacks, or computes otherwise than ONNX says."""
