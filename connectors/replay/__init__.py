"""Episodes of an EnvRunner in, slices with the states to start them from out.

Imports `rows`; imported by `learners` and `setup`.
"""
