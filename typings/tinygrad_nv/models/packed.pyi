from models.packed import *
