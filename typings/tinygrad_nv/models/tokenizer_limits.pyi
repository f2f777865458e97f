from models.tokenizer_limits import *
