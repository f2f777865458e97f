from models.weights import *
