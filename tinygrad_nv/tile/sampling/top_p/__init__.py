"""Filters by sums of weights."""
