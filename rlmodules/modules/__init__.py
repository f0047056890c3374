"""What RLlib sees: batches in, action distributions, values and states out.

Imports `memories` and `networks`; imported by `export`, `old_stack` and `tools`.
"""
