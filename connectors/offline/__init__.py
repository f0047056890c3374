"""Recorded episodes: what an EnvRunner sampled into files, what files hold to Learners.

Imports `rollout`, whose EnvRunner it records from; imported by `learners` and `setup`.
"""
