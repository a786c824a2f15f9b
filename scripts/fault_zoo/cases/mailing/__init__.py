"""Training scripts built from faults that people reported: 22 have one, 11 are repaired twins, 11 look odd."""
