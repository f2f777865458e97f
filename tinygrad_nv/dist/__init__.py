"""Several devices and processes: ranks, how they find each other, and how a fault in one ends all.

Reading order: `ranks` (which process is this), `store` (small values between ranks; `store_server` and
`frames` are behind it), `watchdog` (what ends ranks that hang), `launcher` (what starts them). Importing
tinygrad_nv imports nothing of this package.
"""
