"""Rotary positions of whole sequences in a graph.

  named.py  from q|k|v to heads and back, by name
"""
