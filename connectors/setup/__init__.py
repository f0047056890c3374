"""An `AlgorithmConfig` in, the same config with our connectors, Learner and EnvRunner out.

Stands on top: imports all other folders; imported by nothing of the package but its public names.
"""
