from models.whisper.features import *
