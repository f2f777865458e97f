"""The pytest plugin of vllm_tests.py: where vLLM's tests start `vllm serve`, starts the command in SERVE.

Everything else of their class for servers stays: how it waits, ends it, and makes clients. Without SERVE the
tests start vLLM.
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from typing import Any


def start_server(self: Any, model: str, vllm_serve_args: list[str], env_dict: dict[str, str] | None) -> None:
    """Starts the server with the arguments of a test. It has variables of its own interpreter."""
    env = os.environ | {"PYTHONPATH": os.environ["SERVE_PYTHONPATH"]} | (env_dict or {})
    env.pop("LD_PRELOAD", None)
    command = [*json.loads(os.environ["SERVE"]), model, *vllm_serve_args]
    print(*command)
    self.proc = subprocess.Popen(command, env=env, stdout=sys.stdout, stderr=sys.stderr,
                                 start_new_session=True)


def pytest_sessionstart() -> None:
    if "SERVE" not in os.environ: return
    import_module("tests.utils").RemoteOpenAIServer._start_server = start_server
