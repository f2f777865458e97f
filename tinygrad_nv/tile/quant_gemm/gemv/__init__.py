"""Matmuls of few rows with a quantised matrix: plan.py, template.py, kernel.py."""
