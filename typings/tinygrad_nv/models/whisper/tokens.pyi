from models.whisper.tokens import *
