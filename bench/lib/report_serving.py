"""Measurements of serving, for report.py: throughput beside transformers (serving.py)."""
from __future__ import annotations

from statistics import median

from bench.lib.measure import spread
from bench.lib.report_cpu import NOT_MEASURED, Record, markdown

SERVER = "tinygrad_nv, server"


def serving(record: Record | None) -> str:
    """The server beside generate in batches, and both one request at a time."""
    if record is None: return f"Serving (`bench/serving/throughput.py`): {NOT_MEASURED}."
    runs, told = record["tokens_per_s"], record["server"]
    lines = []
    for name, rates in runs.items():
        ratios = [a / b for a, b in zip(runs[SERVER], rates, strict=True)]
        lines.append([name, f"{median(rates):.0f}",
                      "" if name == SERVER else f"{median(ratios):.2f} ({spread(ratios)})"])
    said = (f"Serving (`bench/serving/throughput.py`, {record['machine']}: {record['requests']} requests of "
            f"about {record['input_len']} tokens and {record['output_len']} after them, model "
            f"{record['model']}, {record['dtype']}, transformers in batches of {record['batch']}; contenders "
            f"take turns). The server's median time to first token is {median(told['median_ttft_ms']):.0f} "
            f"ms with all requests at once, {median(told['median_tpot_ms']):.1f} ms for each token after it:")
    return said + "\n\n" + markdown(["output tokens/s", "median", "the server / it (spread)"], lines)
