from models.embedding_model import *
