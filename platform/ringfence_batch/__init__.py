"""Many tasks, each an agent's run on a copy of a workspace of its own: on this machine, or on a cluster."""
