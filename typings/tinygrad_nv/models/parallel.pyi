from models.parallel import *
