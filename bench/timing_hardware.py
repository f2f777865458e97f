"""Predicted times beside those that an H100 measured: see bench/timing/hardware.py."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.timing.hardware import main

if __name__ == "__main__": sys.exit(main())
