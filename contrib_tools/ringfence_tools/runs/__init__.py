"""One run of an agent on a workspace: what it is made of, how it is opened, what it says, and its report."""
