"""Training data: from files to batches of numpy arrays.

    data = load(["stories/*.txt"], tokenizer, vocab_size, DataOptions(max_length=512, packing=True))
    with Loader(data, LoaderOptions(rows=8, accumulation=2, seed=1)) as loader:
        for step in loader:           # step.batches: one `Batch` a micro-batch; step.state: resume from here

  files.py         Files of paths, directories and globs
  records.py       Text, prompt + completion, conversations and preference pairs of .txt, .jsonl and .parquet
  chat.py          A conversation's ids, and which of them are the assistant's
  encode.py        Records to ids, with a loss mask; texts of many megabytes in parts
  token_cache.py   Tokenized records on disk, under a hash of their content
  packing.py       Which tokens of which documents make a row
  shards.py        Memory-mapped .npy and .bin files of token ids
  dataset.py       `load`: the rows of a data set
  sampler.py       The order of rows: seeded, resumable, the same for any number of ranks
  batch.py         `Row`: ids, labels and segments of a sequence; `Batch`: rows as arrays of a fixed shape
  loader.py        `Loader`: steps of batches, read ahead by a thread
"""
from tinygrad_nv.train.data.batch import IGNORE, Batch, Row, collate
from tinygrad_nv.train.data.dataset import Data, DataOptions, Summary, load
from tinygrad_nv.train.data.loader import Loader, LoaderOptions, Step
from tinygrad_nv.train.data.sampler import Sampler, SamplerState

__all__ = ["IGNORE", "Batch", "Data", "DataOptions", "Loader", "LoaderOptions", "Row", "Sampler",
           "SamplerState", "Step", "Summary", "collate", "load"]
