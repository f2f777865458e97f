from models.whisper import *
