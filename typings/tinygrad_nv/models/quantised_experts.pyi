from models.quantised_experts import *
