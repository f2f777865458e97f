from models.whisper.languages import *
