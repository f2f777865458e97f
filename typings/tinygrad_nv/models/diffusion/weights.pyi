from models.diffusion.weights import *
