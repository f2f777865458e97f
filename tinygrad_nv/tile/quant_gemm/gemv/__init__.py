"""Matmuls of few rows with a quantised matrix: plan.py, kernel.py."""
