from models.lora import *
