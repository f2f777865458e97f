from models.gguf import *
