"""On Learners: episodes in, train batches of padded rows with states and advantages out.

Imports the ground and `monitoring.measures`; imported by `replay`, `offline`, `learners`, `setup`.
"""
