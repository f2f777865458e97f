"""`tinygrad-nv serve` of Stable Diffusion, started as a user does, with OpenAI's client."""
from __future__ import annotations

import base64
import io
import re
import subprocess
import sys

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.support.lazy import lazy
from tests.support.models import diffusion_case as case
from tinygrad_nv.models.diffusion.pipeline import ImageParams, StableDiffusion

openai = lazy("openai")


@pytest.mark.slow
def test_images_are_served():
    command = [sys.executable, "-m", "tinygrad_nv", "serve", str(case.directory()), "--port", "0", "--device",
               "CPU", "--served-model-name", "sd"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        start = ""
        while (found := re.search(r" ready url=(\S+)", start)) is None: start += process.stderr.readline()
        assert "images xl=false size=16x16" in start.lower()
        options = {"seed": 3, "steps": 2, "negative_prompt": "a dog", "scheduler": "euler"}
        with openai.OpenAI(base_url=f"{found[1]}/v1", api_key="none") as client:
            made = client.images.generate(model="sd", prompt="a red cat", n=2, size="16x24",
                                          response_format="b64_json", extra_body=options)
        files = [io.BytesIO(base64.b64decode(each.b64_json or "")) for each in made.data or []]
        got = [np.asarray(Image.open(file)) for file in files]
        params = ImageParams(2, None, "a dog", 24, 16, 3, "euler", 2)
        wanted = StableDiffusion(case.directory()).generate("a red cat", params)
        assert np.abs(np.stack(got).astype(int) - wanted.images).max() <= 1
        for path, body in (("chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
                           ("completions", {"prompt": "hello"}), ("embeddings", {"input": "hello"})):
            answer = httpx.post(f"{found[1]}/v1/{path}", json=body, timeout=60)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_task")
        answer = httpx.post(f"{found[1]}/v1/images/generations", json={"prompt": "x", "size": "17x16"})
        assert (answer.status_code, "multiples of 2" in answer.text) == (400, True)
        process.terminate()
        assert process.wait(60) == 0
