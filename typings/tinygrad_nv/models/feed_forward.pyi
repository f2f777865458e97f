from models.feed_forward import *
