from models.qwen_vl.tower import *
