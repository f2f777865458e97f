from models.diffusion.tokenizer import *
