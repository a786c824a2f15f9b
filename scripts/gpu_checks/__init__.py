"""Checks on a GPU that the tests make without one; see `__main__.py`."""
