from models import *
