"""Calls as steps of a history: made of what a call changed, and undone or restored by path."""
