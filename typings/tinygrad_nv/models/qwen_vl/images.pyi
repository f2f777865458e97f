from models.qwen_vl.images import *
