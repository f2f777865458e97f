"""The driver interface over the emulator: DEV=EMU.

  driver.py  the driver interface with the emulator as the device
  graph.py   streams, events and graphs
  host.py    page-locked memory, and which operation owns its bytes
  module.py  PTX modules, and findings that quote them
  moves.py   copies, fills, uploads and downloads
  peers.py   devices that see each other's memory run beside one another
  order.py   which operations are ordered, and which should be and are not
"""
