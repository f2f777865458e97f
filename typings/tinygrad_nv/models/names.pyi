from models.names import *
