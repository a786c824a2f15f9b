"""Explain a wrong gradient: the Function, hook, cut, write or statement that makes it, and the kind of mistake."""
