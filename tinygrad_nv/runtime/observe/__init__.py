"""Observation: timelines, ranges, predictions, telemetry, the memory report.

  timeline.py       every kernel on its own, measured beside its prediction: `with timeline("trace.json") as
                    t:`
  chrome.py         a timeline as a Chrome trace, for Perfetto (ui.perfetto.dev)
  forecast.py       the predicted time of a kernel
  ranges.py         the layer and the operation of a kernel, and NVTX ranges
  telemetry.py      clocks, power, memory and temperature of a GPU, through NVML
  peak.py           the most memory that the process has had
  memory_report.py  the memory report, and the text of the out-of-memory error
"""
