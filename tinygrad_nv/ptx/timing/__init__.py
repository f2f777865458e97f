"""Time without a GPU: what a launch takes on one, from the emulator's tapes and ptxas's SASS."""
