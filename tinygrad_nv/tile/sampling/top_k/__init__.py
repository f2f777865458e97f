"""Filters by counts."""
