"""Faults at the points that the code on disk names: a hook that raises, kills or looks there."""

from ringfence_workspace.tree.kernel import injected

__all__ = ["injected"]
