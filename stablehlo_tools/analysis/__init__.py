"""Read-only analyses of a module; they never change it."""
