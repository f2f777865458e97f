from models.pickles import *
