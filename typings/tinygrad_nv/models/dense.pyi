from models.dense import *
