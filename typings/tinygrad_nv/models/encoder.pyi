from models.encoder import *
