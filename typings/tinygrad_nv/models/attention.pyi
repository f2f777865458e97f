from models.attention import *
