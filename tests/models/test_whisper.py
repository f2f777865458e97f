"""Whisper against transformers: spectrograms, hidden states, tokens with and without timestamps, segments of
long recordings, and a recording among others as alone."""
from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tinygrad import Tensor
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from tests.support.models import whisper_case as case
from tinygrad_nv.engine.speech.params import TranscriptionParams
from tinygrad_nv.engine.speech.transcriber import Transcriber
from tinygrad_nv.errors import RequestError
from tinygrad_nv.models.whisper.config import read_whisper_config
from tinygrad_nv.models.whisper.features import log_mel
from tinygrad_nv.models.whisper.languages import CODES, language_code
from tinygrad_nv.models.whisper.tokens import SpeechTokens

SHORT = [case.sound(n, i) for i, n in enumerate((15000, 32000, 8000))]
LONG = [case.sound(n, i) for i, n in enumerate((70000, 100003))]
BF16_C = 1.5        # errors of two networks that round at other places


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A directory and the reference of it."""
    directory = tmp_path_factory.mktemp("whisper")
    return directory, case.save(directory)


@pytest.fixture(scope="module")
def whisper(saved: tuple[Path, Any]) -> Iterator[Transcriber]:
    """The model, for three recordings at a time."""
    made = Transcriber(saved[0], device="CPU", max_num_seqs=3)
    yield made
    made.close()


@pytest.mark.parametrize("mels", [80, 128])
@pytest.mark.parametrize("samples", [300, 31999, 32000, 100003])
def test_spectrogram(mels: int, samples: int):
    """As transformers' float64 has it, to the last bits of float32, and no further from its float32 than that
    is."""
    data, window = case.sound(samples, mels), 16000 * case.WINDOW_S
    extractor = transformers.WhisperFeatureExtractor(feature_size=mels)
    padded = np.pad(data, (0, max(0, window - samples)))
    exact = extractor._np_extract_fbank_features(padded[None], "cpu")[0].T
    rounded = case.reference_features(data, mels)[0].numpy().T
    made = log_mel(data, mels, window)
    assert made.shape == rounded.shape == exact.shape
    assert np.abs(made - exact).max() < 1e-6
    assert np.abs(made - rounded).max() <= np.abs(exact - rounded).max() + 1e-6


def test_spectrogram_of_silence():
    made = log_mel(np.zeros(480, np.float32), 80, 3200)
    assert np.array_equal(made, np.full((20, 80), -1.5, np.float32))


def encoded(whisper: Transcriber, features: np.ndarray) -> np.ndarray:
    network = whisper.network
    given = Tensor(features[None], device=whisper.device).cast(network.dtype).contiguous()
    return network.encoder(given).float().numpy()[0]


def test_encoder(saved: tuple[Path, Any], whisper: Transcriber):
    features = case.reference_features(SHORT[1])
    with torch.no_grad(): wanted = saved[1].model.encoder(features).last_hidden_state[0].numpy()
    assert np.abs(encoded(whisper, features[0].numpy().T) - wanted).max() < 2e-4


@pytest.mark.parametrize(("language", "task"), [("en", "translate"), (None, "transcribe")])
@pytest.mark.parametrize("timestamps", [False, True])
def test_tokens_of_short_recordings(saved: tuple[Path, Any], whisper: Transcriber, timestamps: bool,
                                    language: str | None, task: str):
    """Of three at a time; the language is detected where none is given."""
    how: dict[str, Any] = {"language": language, "task": task}
    made = whisper.transcribe_all(SHORT, case.greedy(timestamps=timestamps, **how))
    for samples, found in zip(SHORT, made, strict=True):
        tokens, segments = case.reference(saved[1], samples, return_timestamps=timestamps, **how)
        assert found.token_ids == tokens
        assert len(found.segments) == len(segments)
        if not any(token >= whisper.model.tokens.first_timestamp for token in tokens):
            assert found.segments[-1].end == found.duration


@pytest.mark.parametrize("conditioned", [False, True])
def test_long_recordings(saved: tuple[Path, Any], whisper: Transcriber, conditioned: bool):
    """Windows follow each other at the same places, and each segment has the same times."""
    made = whisper.transcribe_all(LONG, case.greedy(language="German", condition_on_previous=conditioned))
    for samples, found in zip(LONG, made, strict=True):
        tokens, segments = case.reference(saved[1], samples, language="de", return_timestamps=True,
                                          condition_on_prev_tokens=conditioned)
        assert found.token_ids == tokens
        for own, theirs in zip(found.segments, segments, strict=True):
            assert own.start == pytest.approx(float(theirs["start"]), abs=1e-9)
            assert own.end == pytest.approx(float(theirs["end"]), abs=1e-9)
        assert found.duration == len(samples) / 16000


@pytest.mark.parametrize("conditioned", [False, True])
def test_a_prompt(saved: tuple[Path, Any], whisper: Transcriber, conditioned: bool):
    ids = torch.tensor([264, *whisper.model.tokenizer.encode(" Ada", special=False)])
    tokens, _ = case.reference(saved[1], LONG[0], language="en", return_timestamps=True, prompt_ids=ids,
                               condition_on_prev_tokens=conditioned)
    params = case.greedy(language="en", prompt="Ada ", condition_on_previous=conditioned)
    # transformers lists the prompt in front of the first segment, too
    assert whisper.transcribe(LONG[0], params).token_ids == tokens


def test_what_is_no_recording(whisper: Transcriber):
    for given in ([0.0] * 100, b"RIFF", None):
        with pytest.raises(RequestError, match="a recording of type"):
            whisper.transcribe(given)       # type: ignore[arg-type]


def test_a_temperature_near_to_0_is_0(whisper: Transcriber):
    """scores / temperature would be infinite."""
    how: dict[str, Any] = {"language": "en", "max_new_tokens": 4}
    cold = whisper.transcribe(SHORT[0], case.greedy(**how, temperatures=(1e-40,)))
    assert cold.token_ids == whisper.transcribe(SHORT[0], case.greedy(**how)).token_ids


def test_alone_as_among_others(whisper: Transcriber):
    """The same text, times and figures, with choices at temperatures above 0 among them."""
    params = TranscriptionParams(seed=3)
    recordings = [*LONG, *SHORT[:2]]
    together = whisper.transcribe_all(recordings, params)
    assert {each.temperature for found in together for each in found.segments} & {0.6, 0.8, 1.0}
    for samples, found in zip(recordings, together, strict=True):
        alone = whisper.transcribe(samples, params)
        assert alone.token_ids == found.token_ids
        assert alone.text == found.text


def test_a_text_that_was_drawn_is_no_context(whisper: Transcriber):
    """At temperatures from 0.5 on."""
    how: dict[str, Any] = {"language": "de", "temperatures": (0.5,), "max_new_tokens": 12}
    made = [whisper.transcribe(LONG[1], case.greedy(**how, condition_on_previous=conditioned))
            for conditioned in (False, True)]
    assert made[0] == made[1]
    assert len(made[0].segments) > 2


def test_eager_as_captured(saved: tuple[Path, Any], whisper: Transcriber):
    eager = Transcriber(saved[0], device="CPU", max_num_seqs=2, capture=False)
    params = case.greedy(language="en", max_new_tokens=8)
    assert eager.transcribe_all(SHORT[:2], params) == whisper.transcribe_all(SHORT[:2], params)
    eager.close()


def test_figures_of_a_window(saved: tuple[Path, Any], whisper: Transcriber):
    """Mean log probability, compression, and the probability of silence, as transformers counts them."""
    found = whisper.transcribe(SHORT[0], case.greedy(language="en", max_new_tokens=12)).segments[0]
    features = case.reference_features(SHORT[0])
    prompt = whisper.model.tokens.prompt(259, "transcribe", False)
    tokens = torch.tensor([*prompt, *found.tokens])
    with torch.no_grad(): logits = saved[1](input_features=features, decoder_input_ids=tokens[None]).logits[0]
    silence = logits[0].softmax(-1)[265]
    assert found.no_speech_prob == pytest.approx(float(silence), rel=1e-4)
    scores = logits[len(prompt) - 1:-1].clone()
    scores[:, case.GENERATION["suppress_tokens"]] = -torch.inf
    scores[0, case.GENERATION["begin_suppress_tokens"]] = -torch.inf
    wanted = saved[1]._retrieve_avg_logprobs(list(scores), tokens[len(prompt):], 0.0)
    assert found.avg_logprob == pytest.approx(float(wanted), rel=1e-4)
    ratio = saved[1]._retrieve_compression_ratio(tokens[len(prompt):], 420)
    assert found.compression_ratio == pytest.approx(ratio)


def test_fallback_and_silence(whisper: Transcriber):
    """Thresholds that nothing passes: the last temperature; a window that is silent has no text."""
    made = whisper.transcribe(SHORT[0], TranscriptionParams(
        language="en", temperatures=(0.0, 0.4), logprob_threshold=0.0, no_speech_threshold=None))
    assert {each.temperature for each in made.segments} == {0.4}
    silent = whisper.transcribe(SHORT[0], TranscriptionParams(
        language="en", temperatures=(0.0, 0.4), logprob_threshold=0.0, no_speech_threshold=0.0))
    assert (silent.text, silent.segments) == ("", ())


@pytest.mark.parametrize("fields", [
    {"d_model": 48, "encoder_attention_heads": 2, "decoder_attention_heads": 3, "encoder_layers": 1,
     "num_mel_bins": 128, "scale_embedding": True, "activation_function": "relu"},
    {"encoder_ffn_dim": 96, "decoder_ffn_dim": 80, "decoder_layers": 3, "tie_word_embeddings": False,
     "activation_function": "gelu_new"}], ids=["wide", "untied"])
def test_fields(tmp_path: Path, fields: dict[str, Any]):
    """Every field of the configuration: logits of a prompt."""
    model = case.save(tmp_path, 2, **fields)
    whisper = Transcriber(tmp_path, device="CPU", max_num_seqs=1, capture=False)
    features, tokens = case.reference_features(SHORT[2], model.config.num_mel_bins), [258, 266, 5, 17]
    with torch.no_grad():
        wanted = model(input_features=features, decoder_input_ids=torch.tensor([tokens])).logits[0].numpy()
    whisper.runner.encode(0, features[0].numpy().T)
    assert np.abs(whisper.runner.start(0, tokens, 1) - wanted[[1, 3]]).max() < 2e-4
    whisper.close()


def test_an_english_model(tmp_path: Path, saved: tuple[Path, Any]):
    """It has no tokens of languages and tasks."""
    english = {name: value for name, value in case.GENERATION.items() if not name.endswith("_to_id")}
    config = saved[1].generation_config.to_dict()
    for name, value in {**config, **english, "is_multilingual": False}.items():
        if name.endswith("_to_id"): config.pop(name)
        else: config[name] = value
    (tmp_path / "config.json").write_text((saved[0] / "config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    network = read_whisper_config(tmp_path)
    assert network is not None
    tokens = SpeechTokens.read(tmp_path, network)
    assert tokens.prompt(tokens.language(None), "transcribe", False) == [258, 266]
    assert tokens.prompt(None, "transcribe", True) == [258]


def test_bfloat16(saved: tuple[Path, Any]):
    """Hidden states and logits with at most 1.5 × the error of transformers in bfloat16, and its next token
    wherever that is decided by more than its own rounding."""
    directory, exact = saved
    whisper = Transcriber(directory, device="CPU", dtype="bfloat16", max_num_seqs=1)
    rounded = transformers.WhisperForConditionalGeneration.from_pretrained(
        directory, dtype=torch.bfloat16).eval()
    case.configure(rounded)
    features = case.reference_features(SHORT[1])
    prompt = whisper.model.tokens.prompt(259, "transcribe", False)
    tokens = case.reference(rounded, SHORT[1], language="en")[0]
    given, ends = torch.tensor([[*prompt, *tokens]]), slice(len(prompt) - 1, -1)
    states, logits = [], []
    with torch.no_grad():
        for model in (exact, rounded):
            made = model(input_features=features.to(model.dtype), decoder_input_ids=given)
            states.append(made.encoder_last_hidden_state[0].float().numpy())
            logits.append(made.logits[0, ends].float().numpy())
    whisper.runner.encode(0, features[0].numpy().T)
    rows = [whisper.runner.start(0, prompt, 0)[1]]
    for length, token in enumerate(tokens[:-1], len(prompt) + 1):
        rows += [*whisper.runner.step([0], [token], [length])]
    for own, (true, near) in ((encoded(whisper, features[0].numpy().T), states), (np.stack(rows), logits)):
        error, noise = (np.square(each - true).mean() ** 0.5 for each in (own, near))
        assert error <= BF16_C * noise
    best = np.sort(logits[1])[:, -2:]
    decided = best[:, 1] - best[:, 0] > 4 * noise
    assert decided.mean() > 0.5
    assert np.array_equal(np.stack(rows).argmax(-1)[decided], logits[1].argmax(-1)[decided])
    whisper.close()


def test_a_cancelled_recording(whisper: Transcriber):
    """A future that is cancelled while it waits leaves the others alone."""
    params = case.greedy(language="en", max_new_tokens=4)
    futures = whisper.engine.submit([whisper.recording(SHORT[0], params) for _ in range(8)])
    cancelled = futures[-1].cancel()
    wanted = whisper.transcribe(SHORT[0], params)
    assert all(each.result() == wanted for each in futures[:-1])
    assert cancelled == futures[-1].cancelled()


def test_languages():
    """Codes and names are transformers'."""
    assert CODES == TO_LANGUAGE_CODE
    given = ("EN", " German ", "Haitian Creole", "<|yue|>", "xx")
    assert [language_code(text) for text in given] == ["en", "de", "ht", "yue", None]
