"""React to findings in the user's own loop: print them, raise an error, or call a function."""
