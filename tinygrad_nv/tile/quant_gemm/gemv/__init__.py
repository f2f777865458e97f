"""Matmuls of few rows with a quantised matrix: plan.py, legality.py, defaults.py, kernel.py."""
