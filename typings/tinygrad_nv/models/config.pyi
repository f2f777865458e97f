from models.config import *
