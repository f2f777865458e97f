from models.layers import *
