from models.llama import *
