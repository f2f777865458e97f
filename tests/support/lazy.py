"""Packages that take a second to import, imported when a test uses them and not when tests are collected."""
from __future__ import annotations

import importlib
import types
from typing import Any


class Lazy(types.ModuleType):
    """A module that is imported at the first use of what is in it."""

    def __getattr__(self, name: str) -> Any:
        # pytest asks everything in a module of tests whether it is a fixture
        if name.startswith("_"): raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


def lazy(name: str) -> Any:
    """Returns what stands for the module: `openai = lazy("openai")`."""
    return Lazy(name)
