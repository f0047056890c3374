"""A checkpoint in, an agent that acts out; and checkpoints that are whole or not there.

Imports `rollout`; imported by `serving` and `setup`.
"""
