"""Checks of a place where LongStraw is to run, each independent of the others; nothing is changed by any of them."""
