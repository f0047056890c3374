"""States and rows in, metrics out.

`measures` has the names, which `rows`, `offline` and `learners` log; `callback` imports the ground.
"""
