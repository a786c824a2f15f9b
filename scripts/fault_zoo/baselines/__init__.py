"""Monitors with the published rules of other tools."""
