from models.gguf_path import *
