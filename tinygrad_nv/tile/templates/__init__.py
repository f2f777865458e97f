"""Kernel families: each makes PTX from a spec and a schedule, for the architectures it names."""
