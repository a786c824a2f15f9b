"""Faults that people reported, written anew without a look at gradwatch, and runs that only look odd."""
