"""Training scripts built from faults that trackers and forums hold: 24 have one, 12 are repaired twins, 12 look odd."""
