"""Prepare what `watch` attaches: check its arguments, and open its run directory."""
