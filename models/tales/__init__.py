"""Small English stories and the tokenizer trained on them: the data behind the model in the box.

    stories.corpus("train", 50_000)  ->  story texts, the same on every platform
    tokenizer.train_tokenizer(texts) ->  a byte-level BPE, saved in the Hugging Face directory layout

`words` holds the word tables; `scenes`, `mishaps` and `wishes` the sentence forms; `plots` the plots, which
are lines of beats; `stories` the teller that picks forms and fills them. Nothing here needs tinygrad: the
training script turns the texts into token ids, and the checkpoint it writes is what the engine serves.
"""
