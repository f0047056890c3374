"""Weights of RLlib's old API stack in, modules of the new one out.

Imports `modules`; imported by nothing of the package but its public names.
"""
