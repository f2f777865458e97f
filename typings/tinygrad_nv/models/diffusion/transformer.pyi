from models.diffusion.transformer import *
