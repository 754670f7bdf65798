"""Calls workspaces that can be called: streams a request through to them, and the answer back."""


class Push:
    """The way to push-mode workspaces."""
