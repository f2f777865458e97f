from models.whisper.layers import *
