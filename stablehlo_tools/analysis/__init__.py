"""Read-only facts about a module; nothing here mutates it."""
