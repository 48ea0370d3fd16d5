"""Policies that come with ringfence: read before write, what a call may change, and approval by a person."""
