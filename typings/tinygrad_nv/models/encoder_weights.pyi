from models.encoder_weights import *
