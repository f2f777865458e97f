from models.whisper.network import *
