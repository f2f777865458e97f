from models.pooling import *
