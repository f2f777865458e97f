from models.parts import *
