"""Named experiments as frozen dataclasses."""
