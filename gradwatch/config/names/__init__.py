"""Look up the names that a config may use, and the settings of each name.

griffe reads them from the sources, because `list` and `explain` work without torch, which takes seconds to import.
`inspect.signature` would need torch, and would still need the sources: it does not follow `**kwargs`, which hide the
keywords of torchvision's builders.
"""
