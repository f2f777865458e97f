from models.multimodal import *
