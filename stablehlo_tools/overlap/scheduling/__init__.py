"""Orders and buckets of a task graph that hide its communication, within a memory limit."""
