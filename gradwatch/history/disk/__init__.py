"""Write a history to a run directory and read it back: JSON, JSON lines and raw arrays, never code."""
