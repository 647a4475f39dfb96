"""Scorers: models that look at frames and say how far along or how well matched they are."""
