"""The emulator behind the driver interface: DEV=EMU.

  driver.py  The driver interface with the emulator as the device
  graph.py   Streams, events and graphs of the emulated driver
  host.py    Page-locked memory of the emulated driver, and who owns its bytes
  module.py  Modules of the emulated driver: PTX text, and findings that quote it
  order.py   What is ordered among the work of an emulated device, and what should be and is not
"""
