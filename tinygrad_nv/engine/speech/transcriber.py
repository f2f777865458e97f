"""`Transcriber`: a loaded Whisper model, from recordings to text.

    from tinygrad_nv import Transcriber

    transcriber = Transcriber("whisper-tiny")
    print(transcriber.transcribe("speech.wav").text)

Protocol: `transcribe` takes a recording and returns its `Transcription`, `transcribe_all` several, batched.
A recording is a file, or float32 samples at 16 kHz. `recording` and the `engine` are for callers that do not
wait.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import TypeAlias

import numpy as np
from tinygrad import dtypes

from tinygrad_nv.engine.loading import open_device
from tinygrad_nv.engine.memory_planning import require_weights
from tinygrad_nv.engine.speech.audio import read_audio
from tinygrad_nv.engine.speech.batching import Cancelled, SpeechEngine
from tinygrad_nv.engine.speech.outputs import Segment, Transcription
from tinygrad_nv.engine.speech.params import TranscriptionParams
from tinygrad_nv.engine.speech.recording import Recording, SpeechModel
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.engine.worker.speech_runner import SpeechRunner
from tinygrad_nv.errors import ModelError, RequestError
from tinygrad_nv.models.config import DTYPES
from tinygrad_nv.models.weights import main_dtype
from tinygrad_nv.models.whisper import weights
from tinygrad_nv.models.whisper.config import ARCHITECTURE, read_whisper_config
from tinygrad_nv.models.whisper.network import Whisper
from tinygrad_nv.models.whisper.tokens import SpeechTokens
from tinygrad_nv.runtime.memory_pool import UTILIZATION

Audio: TypeAlias = str | Path | np.ndarray
TranscriptionProgress: TypeAlias = Callable[[int, float, float], None]
SHORT = {"fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}


class Transcriber:
    """The Whisper model in `directory`, as transformers saves it, on `device` (None: tinygrad's default).
    `dtype` is "auto" (the checkpoint's), "float32", "float16" or "bfloat16". At most `max_num_seqs`
    recordings run at a time, and `max_queue` more wait. Unless `capture` is set, steps run eagerly.
    `progress(done, total)` is called with bytes that are read, `stage(name)` at the end of each stage of
    loading. Raises `ModelError`, `TokenizerError`, and `RequestError` for a bound below 1."""

    def __init__(self, directory: str | Path, *, device: str | None = None, dtype: str = "auto",
                 max_num_seqs: int = 8, max_queue: int = 1024, capture: bool = True,
                 gpu_memory_utilization: float = UTILIZATION,
                 progress: Callable[[int, int], None] | None = None,
                 stage: Callable[[str], None] = lambda name: None) -> None:
        for bound, value in (("max_num_seqs", max_num_seqs), ("max_queue", max_queue)):
            if value < 1: raise RequestError(f"{bound} is {value}", "at least 1", f"raise {bound}")
        self.directory = Path(directory)
        config = read_whisper_config(self.directory)
        if config is None:
            raise ModelError(f"{directory} is no model for transcription", f"a directory of a {ARCHITECTURE}",
                             "use a Whisper model, as transformers saves it")
        name = SHORT.get(dtype, dtype)
        if name == "auto": name = config.dtype or main_dtype(self.directory)
        if name not in DTYPES:
            raise ModelError(f"unknown dtype {dtype!r}", f"auto, {', '.join(DTYPES)}", "change --dtype")
        self.config, self.device = config, open_device(device)
        weights.require_whisper_sizes(config, self.directory)
        self.model = SpeechModel(config, SpeechTokens.read(self.directory, config),
                                 Tokenizer.load(self.directory))
        self.network = Whisper(config, {"float32": dtypes.float32, "float16": dtypes.float16,
                                        "bfloat16": dtypes.bfloat16}[name], self.device)
        require_weights(self.device, weights.nbytes(self.network), gpu_memory_utilization)
        stage("read files")
        weights.load(self.network, self.directory, progress)
        stage("load weights")
        self.runner = SpeechRunner(self.network, max_num_seqs, capture)
        self.engine = SpeechEngine(self.runner, max_queue)

    def transcribe(self, audio: Audio, params: TranscriptionParams | None = None) -> Transcription:
        """The transcription of one recording."""
        return self.transcribe_all([audio], params)[0]

    def transcribe_all(self, audio: Sequence[Audio], params: TranscriptionParams | None = None,
                       progress: TranscriptionProgress = lambda number, done, total: None
                       ) -> list[Transcription]:
        """The transcriptions of recordings, in their order. `progress(number, done, total)` is called with
        the number of a recording, and seconds of it. Raises `AudioError` and `RequestError`."""
        def progress_of(number: int) -> Callable[[float, float], None]:
            return lambda done, total: progress(number, done, total)
        recordings = [self.recording(each, params, progress=progress_of(i)) for i, each in enumerate(audio)]
        cancelled = Cancelled()
        futures = self.engine.submit(recordings, cancelled)
        try: wait(futures)
        except BaseException:
            cancelled.asked = True
            raise
        return [each.result() for each in futures]

    def recording(self, audio: Audio, params: TranscriptionParams | None = None,
                  on_segment: Callable[[Segment], None] = lambda segment: None,
                  progress: Callable[[float, float], None] = lambda done, total: None) -> Recording:
        """A recording, to be submitted to the engine."""
        if not isinstance(audio, str | Path | np.ndarray):
            raise RequestError(f"a recording of type {type(audio).__name__}",
                               "a path, or a NumPy array of floats at 16 kHz", "convert it: np.asarray(…)")
        samples = audio if isinstance(audio, np.ndarray) else read_audio(Path(audio))
        return Recording(self.model, samples, params or TranscriptionParams(), on_segment, progress)

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compiles and captures steps."""
        self.runner.warm_up(progress)

    def close(self) -> None:
        """Cancels what waits. Nothing can be transcribed afterwards."""
        self.engine.close()
        self.runner.close()
