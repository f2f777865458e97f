"""`python -m tinygrad_nv` is `tinygrad-nv`."""
import sys

from tinygrad_nv.cli import main

if __name__ == "__main__": sys.exit(main())
