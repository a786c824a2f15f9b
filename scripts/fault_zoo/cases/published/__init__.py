"""Scripts of bugs that people reported, each with a repaired twin."""
