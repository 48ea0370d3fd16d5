"""Tool calls as deeds: noted in a journal, done, and undone by a rollback or by the recovery after a crash."""
