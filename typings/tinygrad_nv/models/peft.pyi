from models.peft import *
