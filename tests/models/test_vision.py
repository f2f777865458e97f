"""Qwen2.5-VL in the engine gives transformers' greedy tokens: text alone, images, and images amid other
requests."""
from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.support.models.vision_case import END, IMAGE, SECTIONS, START, greedy, picture, scored, written
from tests.support.server.serve_case import Live, live
from tinygrad_nv.engine.async_engine import AsyncEngine
from tinygrad_nv.engine.beam_search import BeamSearchParams
from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.server.limits import RequestLimits
from tinygrad_nv.server.metrics import Metrics
from tinygrad_nv.server.service import Service

COUNT = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
TEXT = [5, 6, 7, 8, 9]
ONE = [5, 6, START, IMAGE, END, 7, 8, 9]
TURNS = [*ONE, 10, 11, 12, 13, 14, 15, 16, 17, START, IMAGE, END, 7, 8]
TWO = [5, START, IMAGE, END, 6, 7, START, IMAGE, END, 11]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("vision")
    return directory, written(directory)


@pytest.fixture(scope="module")
def llm(reference: tuple[Path, Any]) -> Iterator[LLM]:
    with LLM(reference[0], device="CPU", max_model_len=256, max_num_seqs=4, num_pages=40,
             max_num_batched_tokens=16) as made: yield made


def prompt(ids: list[int], *images: np.ndarray) -> dict[str, Any]:
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": [*images]}}


def answers(llm: LLM, prompts: list[Any], count: int = COUNT) -> list[list[int]]:
    params = replace(GREEDY, max_tokens=count)
    return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)]


def test_text_and_images_in_one_batch(reference: tuple[Path, Any], llm: LLM):
    """Text, an image, two images, other images with equal tokens: chunks of 16 tokens cut images. Log
    probabilities within 1e-3."""
    cases = [(TEXT, []), (ONE, [picture(0)]), (TWO, [picture(1), picture(2, 60, 200)]), (ONE, [picture(3)]),
             ([9, 8, 7], []), (ONE, [picture(0)])]
    expected = [scored(reference[1], ids, images, COUNT) for ids, images in cases]
    assert len({tuple(tokens) for tokens, _ in expected}) == 5
    params = replace(GREEDY, logprobs=0)
    made = llm.generate([prompt(ids, *images) for ids, images in cases], params, use_tqdm=False)
    for one, (tokens, logprobs) in zip(made, expected, strict=True):
        found = one.outputs[0]
        assert list(found.token_ids) == tokens
        own = [each[token].logprob for token, each in zip(tokens, found.logprobs, strict=True)]
        assert np.abs(np.array(own) - logprobs).max() <= 1e-3


def test_prefix_cache(reference: tuple[Path, Any], llm: LLM):
    """Of the same image again, and not of another."""
    first, second = picture(7, 120, 120), picture(8, 120, 120)
    expected = [greedy(reference[1], ONE, [each], COUNT) for each in (first, second)]
    hits = []
    for image in (first, second, first, second):
        before = llm.core.stats().prefix_hits
        assert answers(llm, [prompt(ONE, image)]) == [expected[image is second]]
        hits.append(llm.core.stats().prefix_hits - before)
    assert hits == [0, 0, 16, 16]
    pil = {"prompt_token_ids": ONE, "multi_modal_data": {"image": Image.fromarray(first)}}
    assert answers(llm, [pil]) == [expected[0]]


def test_prefix_cache_over_turns(reference: tuple[Path, Any], llm: LLM):
    """A second image leaves the pages before it as they are; another second image shares the first's."""
    images = [picture(seed, 120, 120) for seed in (30, 31, 32)]
    hits = []
    for ids, given in ((ONE, images[:1]), (TURNS, images[:2]), (TURNS, [images[0], images[2]])):
        before = llm.core.stats().prefix_hits
        assert answers(llm, [prompt(ids, *given)], 3) == [greedy(reference[1], ids, given, 3)]
        hits.append(llm.core.stats().prefix_hits - before)
    assert hits == [0, 16, 32]


def test_preemption(reference: tuple[Path, Any], llm: LLM):
    """Sequences that lose their pages compute their images again."""
    cases = [(TWO, [picture(i), picture(i + 20, 100, 200)]) for i in range(2)]
    expected = [greedy(reference[1], ids, images, 3 * COUNT) for ids, images in cases]
    with LLM(reference[0], device="CPU", max_model_len=96, max_num_seqs=2, num_pages=15,
             page_size=8, max_num_batched_tokens=16, enable_prefix_caching=False) as small:
        assert answers(small, [prompt(ids, *images) for ids, images in cases], 3 * COUNT) == expected
        assert small.core.stats().preempted > 0


def png(image: np.ndarray) -> str:
    made = io.BytesIO()
    Image.fromarray(image).save(made, "PNG")
    return "data:image/png;base64," + base64.b64encode(made.getvalue()).decode()


def conversation(url: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "ab"},
                                         {"type": "image_url", "image_url": {"url": url}},
                                         {"type": "text", "text": "c"}]}]


def chat_tokens(llm: LLM) -> list[int]:
    """The conversation's, with one placeholder."""
    text = "user:ab<|vision_start|><|image_pad|><|vision_end|>c;"
    return llm.require_tokenizer().encode(text, special=False)


def test_chat(reference: tuple[Path, Any], llm: LLM, tmp_path: Path):
    """Of a data URL, a file URL, an image of PIL, and a prompt of text."""
    image = picture(5)
    expected = greedy(reference[1], chat_tokens(llm), [image], COUNT)
    (file := tmp_path / "a b.png").write_bytes(base64.b64decode(png(image).partition(",")[2]))
    pil = conversation("")
    pil[0]["content"][1] = {"type": "image", "image": Image.fromarray(image)}
    for messages in (conversation(png(image)), conversation(file.as_uri()), pil):
        [made] = llm.chat(messages, GREEDY, use_tqdm=False)
        assert list(made.outputs[0].token_ids) == expected
    text = {"prompt": "user:ab<|vision_start|><|image_pad|><|vision_end|>c;",
            "multi_modal_data": {"image": image}}
    assert answers(llm, [text]) == [expected]


def test_beam_search(llm: LLM):
    """The best of one beam is the greedy answer."""
    params = BeamSearchParams(beam_width=1, max_tokens=4, ignore_eos=True)
    [found] = llm.beam_search([prompt(ONE, picture(0))], params)
    assert found.sequences[0].tokens[-4:] == answers(llm, [prompt(ONE, picture(0))])[0][:4]


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Live]:
    engine = AsyncEngine(llm)
    service = Service(engine, llm, ("vl",), RequestLimits(), Metrics("vl", 256, engine.stats),
                      vision=llm)
    with live(service) as running: yield running


def test_served(reference: tuple[Path, Any], llm: LLM, server: Live):
    image = picture(6)
    expected = greedy(reference[1], chat_tokens(llm), [image], COUNT)
    asked = {"messages": conversation(png(image)), "temperature": 0, "max_tokens": COUNT, "ignore_eos": True,
             "return_token_ids": True}
    made = server.http.post("/v1/chat/completions", json=asked).json()
    assert made["choices"][0]["token_ids"] == expected
    assert made["usage"]["prompt_tokens"] == len(chat_tokens(llm)) + 14


@pytest.mark.parametrize(("url", "words"), [
    ("http://example.com/a.png", "not downloaded"), ("file:///etc/passwd", "data URL"),
    ("data:image/png,abc", "base64"), ("data:image/png;base64,!", "no base64"),
    ("data:image/png;base64,AAAA", "cannot be decoded")])
def test_urls_that_are_refused(server: Live, url: str, words: str):
    made = server.http.post("/v1/chat/completions", json={"messages": conversation(url)})
    assert made.status_code == 400
    assert words in made.json()["error"]["message"]


def test_published_names_and_fields(reference: tuple[Path, Any], tmp_path: Path):
    """A flat config.json, and names without the prefix "model.", as Qwen publishes them."""
    data = json.loads((reference[0] / "config.json").read_text())
    text = data.pop("text_config")
    rope = text.pop("rope_parameters")
    data |= {**text, "architectures": data["architectures"], "model_type": "qwen2_5_vl",
             "rope_theta": rope["rope_theta"],
             "rope_scaling": {"type": "mrope", "mrope_section": SECTIONS}}
    (tmp_path / "config.json").write_text(json.dumps(data))
    def old(name: str) -> str:
        return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
    tensors = load_file(reference[0] / "model.safetensors")
    save_file({old(name): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    expected = greedy(reference[1], ONE, [image := picture(0, 56, 84)], 4)
    with LLM(tmp_path, device="CPU", max_model_len=64, max_num_seqs=1) as made:
        assert answers(made, [prompt(ONE, image)])[0][:4] == expected
