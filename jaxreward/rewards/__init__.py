"""Rewards: one file per reward; base.py holds the protocol and what rewards share."""
