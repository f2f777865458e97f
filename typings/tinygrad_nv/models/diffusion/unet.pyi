from models.diffusion.unet import *
