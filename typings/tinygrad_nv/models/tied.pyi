from models.tied import *
