"""Deployment: a trained module in, an ONNX or `.pt2` file of single steps out.

Imports `modules`; imported by nothing of the package but its public names.
"""
