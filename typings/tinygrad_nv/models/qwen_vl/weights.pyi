from models.qwen_vl.weights import *
