from models.diffusion.config import *
