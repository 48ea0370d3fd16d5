"""Calls as steps of a history: made of what a call tells, and undone or restored by path."""
