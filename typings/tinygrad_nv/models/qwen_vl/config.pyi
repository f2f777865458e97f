from models.qwen_vl.config import *
