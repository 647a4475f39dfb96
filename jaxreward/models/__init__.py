"""Flax Linen modules: encoders shared by agents and scorers, and the frame ranker."""
