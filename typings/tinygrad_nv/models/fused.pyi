from models.fused import *
