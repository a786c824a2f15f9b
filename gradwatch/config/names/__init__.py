"""The names that a config may use, and the settings that each takes.

griffe reads them from the sources, because `list` and `explain` answer without torch, which takes seconds to import.
`inspect.signature` would need torch, and would still need the sources: it does not follow `**kwargs`, which hide the
keywords of torchvision's builders.
"""
