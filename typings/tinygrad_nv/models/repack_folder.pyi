from models.repack_folder import *
