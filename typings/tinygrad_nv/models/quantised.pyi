from models.quantised import *
