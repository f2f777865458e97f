"""`python -m tinygrad_nv` is `tinygrad-nv`."""
import contextlib
import os
import sys

from tinygrad_nv import interrupt
from tinygrad_nv.version import versions


def main() -> int:
    """Runs the command. Its version is told without what takes a second to import."""
    if interrupt.asks_version():
        with contextlib.suppress(OSError): os.write(1, f"{versions()}\n".encode())  # also into a closed pipe
        return 0
    from tinygrad_nv.cli import main
    return main()


if __name__ == "__main__": sys.exit(main())
