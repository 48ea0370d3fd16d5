"""Forks of a workspace: directories with a history of their own that borrow the objects of the one that they left."""
