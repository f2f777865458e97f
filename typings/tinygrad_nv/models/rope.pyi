from models.rope import *
