from models.whisper.config import *
