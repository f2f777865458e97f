"""Group norm on a CPU.

  kernel.py     the template
  templates.py  the record
"""
