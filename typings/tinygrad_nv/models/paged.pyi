from models.paged import *
