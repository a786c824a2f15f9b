"""Derive ranked causes from findings, each with a confirmation and remedies."""
