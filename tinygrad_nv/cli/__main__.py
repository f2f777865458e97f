"""`python -m tinygrad_nv.cli` is `tinygrad-nv`."""
import sys

from tinygrad_nv.cli import main

if __name__ == "__main__": sys.exit(main())
