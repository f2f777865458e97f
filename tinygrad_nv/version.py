"""The version of this package, which its build reads, too."""
__version__ = "0.2.0"


def versions() -> str:
    """Names this package and tinygrad with their versions."""
    from importlib.metadata import version
    return f"tinygrad_nv {__version__} tinygrad {version('tinygrad')}"
