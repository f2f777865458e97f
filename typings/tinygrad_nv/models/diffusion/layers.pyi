from models.diffusion.layers import *
