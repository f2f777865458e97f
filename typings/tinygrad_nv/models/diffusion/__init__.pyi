from models.diffusion import *
