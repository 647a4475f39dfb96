"""Rewards: one file per reward; base.py holds the protocol and the combinators."""
