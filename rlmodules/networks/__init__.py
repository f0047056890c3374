"""What stands around a memory: observations in, features, action and value outputs out.

Imports RLlib's catalogs for convolutions and distributions; imported by `modules`.
"""
