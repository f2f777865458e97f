from models.tales.train import *
