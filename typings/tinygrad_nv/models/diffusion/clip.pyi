from models.diffusion.clip import *
