"""`tinygrad-nv transcribe`."""
from __future__ import annotations

import json
import wave
from pathlib import Path

import numpy as np
import pytest

from tests.support.models import whisper_case as case


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whisper")
    case.save(directory)
    return directory


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    made = []
    for number, samples in enumerate((20000, 50000)):
        path = tmp_path / f"{number}.wav"
        with wave.open(str(path), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16000)
            file.writeframes((case.sound(samples, number) * 32767).astype(np.int16).tobytes())
        made.append(str(path))
    return made


def test_formats(command, model: Path, files: list[str], tmp_path: Path):
    """Text, lines, subtitles and JSON agree; a summary goes to stderr."""
    options = ["--model", str(model), "--device", "CPU", "--temperature", "0", "--language", "german"]
    found = [json.loads(line) for line in
             command("transcribe", *files, *options, "--json").succeeded().out.splitlines()]
    assert [(each["file"], each["language"], each["duration"]) for each in found] == [
        (files[0], "de", 1.25), (files[1], "de", 3.125)]
    done = command("transcribe", files[1], *options, "--srt").succeeded()
    spoken = [each for each in found[1]["segments"] if each["text"].strip()]
    assert done.out.count(" --> ") == len(spoken) > 0
    assert "[3.1 s of speech in " in done.err
    out = tmp_path / "out"
    command("transcribe", *files, *options, "--timestamps", "-o", str(out)).succeeded()
    assert (out / "1.txt").read_text().count(" → ") == len(spoken)
    done = command("transcribe", *files, *options).succeeded()
    assert done.out.startswith(f"== {files[0]} ==\n")


def test_refused(command, model: Path, files: list[str], tmp_path: Path):
    """Before the model is loaded."""
    named = ["--model", str(model)]
    command("transcribe", files[0]).refused("no model is named", "--model openai/whisper-tiny")
    command("transcribe", str(tmp_path / "none.wav"), *named).refused("none.wav cannot be read")
    command("transcribe", *files, *named, "--srt").refused("one output of subtitles", "--output-dir")
    command("transcribe", files[0], files[0], *named, "-o", str(tmp_path)).refused("called 0")
    command("transcribe", files[0], *named, "--max-num-seqs", "0").refused("--max-num-seqs is 0")
    command("transcribe", files[0], *named, "--temperature", "9").refused("temperature is 9.0")
    command("transcribe", files[0], "--model", str(tmp_path)).refused("is no model for transcription")
