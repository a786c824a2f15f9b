"""Derive ranked causes from findings, each with a way to confirm it and remedies."""
