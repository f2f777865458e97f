from models.qwen_vl import *
