from models.diffusion.vae import *
