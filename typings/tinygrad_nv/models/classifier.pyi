from models.classifier import *
