from models.diffusion.pipeline import *
