"""Speech to text: Whisper over recordings of any length, batched.

Read in this order:
  params.py       `TranscriptionParams`: language, task, timestamps, and when a window is decoded again
  outputs.py      `Transcription` and its `Segment`s; SubRip and WebVTT
  audio.py        files to samples at 16 kHz
  recording.py    one recording, window by window, as a coroutine that asks for one token at a time
  batching.py     the thread that runs the coroutines of many recordings together
  transcriber.py  `Transcriber`: a loaded model directory

The device's side is worker/speech_runner.py.
"""
