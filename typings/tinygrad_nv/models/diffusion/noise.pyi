from models.diffusion.noise import *
