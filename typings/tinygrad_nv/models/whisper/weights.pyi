from models.whisper.weights import *
