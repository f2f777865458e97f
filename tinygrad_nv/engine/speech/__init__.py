"""Speech to text: Whisper over recordings of any length, batched.

Read in this order:
  params.py       `TranscriptionParams`: language, task, timestamps, and when a window is decoded again
  outputs.py      `Transcription` and its `Segment`s
  audio.py        files to samples at 16 kHz
  recording.py    one recording, window by window, as a coroutine that asks for one token at a time
  segments.py     tokens of a window to segments, and where the next window begins
  batching.py     the thread that runs the coroutines of many recordings together
  transcriber.py  `Transcriber`: a loaded model directory
  subtitles.py    transcriptions as SubRip and WebVTT

The device's side is worker/speech_runner.py.
"""
