from models.tales import *
