from models.embedding import *
