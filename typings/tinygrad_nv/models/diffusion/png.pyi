from models.diffusion.png import *
