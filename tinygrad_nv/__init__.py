"""tinygrad_nv: NVIDIA-native lowering for tinygrad."""
