"""The training loop, its two stages, and the run that wires them."""
