from models.tales.stories import *
