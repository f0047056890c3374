"""HTTP requests in, actions of a trained agent out, with a state for each session.

Imports `acting`; imported by nothing of the package. Needs the extra `serve`.
"""

from connectors.serving.application import from_settings, serve_policy

__all__ = ["from_settings", "serve_policy"]
