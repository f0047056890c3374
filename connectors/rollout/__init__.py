"""On EnvRunners: observations in; actions, and episodes with a snapshot a row, out.

Imports the ground (`agents`, `snapshots`, `trials`, `validation`); imported by `acting`, `offline`
and `setup`.
"""
