from models.diffusion.blocks import *
