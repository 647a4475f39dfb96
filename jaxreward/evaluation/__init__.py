"""Evaluation of policies and of reward quality."""
