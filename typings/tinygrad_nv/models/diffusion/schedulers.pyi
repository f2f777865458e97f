from models.diffusion.schedulers import *
