from models.rope_tables import *
