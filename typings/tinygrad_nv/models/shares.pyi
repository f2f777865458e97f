from models.shares import *
