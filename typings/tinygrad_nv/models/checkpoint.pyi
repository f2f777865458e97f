from models.checkpoint import *
