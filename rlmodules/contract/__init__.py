"""Proofs: a memory or a module in, an AssertionError out if it breaks a promise.

Imports `memories`; imported by nothing of the package but its public names.
"""
