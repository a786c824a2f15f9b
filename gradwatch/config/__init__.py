"""Strict YAML configs: read, override, validate, describe. Needs no torch."""
