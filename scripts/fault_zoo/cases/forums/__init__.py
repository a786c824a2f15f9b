"""Training scripts built from faults that people reported: half have one, half are repaired twins or odd runs."""
