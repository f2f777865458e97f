"""Tokens and text: tokenizer, chat templates, detokenizer, stop strings.

  chat_template.py       Chat templates, in jinja's sandbox
  content_format.py      How a template reads contents: as texts, or as lists of parts
  earlier_calls.py       Arguments of earlier tool calls, as templates read them
  templates.py           The templates of a model, by name
  detokenizer.py         Incremental detokenization, and stop strings
  gguf.py                The tokenizer of a GGUF file
  output_processor.py    `OutputProcessor`: sampled tokens of a request to text
  token_bytes.py         The bytes of each token of a vocabulary
  tokenizer.py           Text to ids and back, and chat templates
  tokenizer_config.py    What tokenizer_config.json changes about a tokenizer.json; added tokens
  vocabulary_files.py    Tokenizers of directories without tokenizer.json
  sentencepiece.py       … of a SentencePiece model, which sentencepiece_file.py reads
"""
