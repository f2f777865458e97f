from models.encoder_config import *
