"""Doors: other frameworks run their commands and file calls on a workspace. Each module needs its framework.

Nothing is imported here. `ringfence_doors.pydantic_ai` and its neighbours import their frameworks when they are.
"""
