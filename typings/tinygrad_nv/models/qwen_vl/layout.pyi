from models.qwen_vl.layout import *
