"""Catrap: a boulder-and-ladder puzzle in pure JAX, and the same game as a Game Boy cartridge."""
