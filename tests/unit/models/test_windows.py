"""Which layers have a window, and what a layer with one sees."""
from __future__ import annotations

import numpy as np
import pytest
from transformers import Gemma3TextConfig

from tinygrad_nv import dtypes
from tinygrad_nv.models.attention import Attention
from tinygrad_nv.models.config import parse_config

FIELDS = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 13,
          "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 3,
          "max_position_embeddings": 256}


@pytest.mark.parametrize("every", [None, 4])
def test_global_layers_of_gemma3(every: int | None):
    """Without layer_types every sixth layer, or as many as sliding_window_pattern says, sees all."""
    more = {} if every is None else {"sliding_window_pattern": every}
    types = Gemma3TextConfig(**FIELDS, **more).layer_types
    ours = parse_config({"architectures": ["Gemma3ForCausalLM"], **FIELDS, **more})
    assert ours.windows == tuple(3 if each == "sliding_attention" else None for each in types)
    assert None in ours.windows


@pytest.mark.parametrize(("rows", "start"), [(1, 0), (1, 7), (5, 0), (5, 7)])
def test_the_mask_of_a_window(rows: int, start: int):
    """A position sees itself and those before it, as many as the window has."""
    config = parse_config({"architectures": ["Gemma3ForCausalLM"], **FIELDS})
    mask = Attention(config, 0, dtypes.float32, "CPU").mask(rows, start)
    assert mask is not None
    i, j = np.arange(rows)[:, None] + start, np.arange(start + rows)
    np.testing.assert_array_equal(mask.numpy(), (j <= i) & (j > i - 3))
