"""The names that a config may use, and the settings that each takes.

griffe reads them from the sources: `list`, `explain` and a mistake in a config need no torch, which takes seconds to
import, and torchvision's builders hide their keywords behind `**kwargs`, which `inspect.signature` does not follow.
"""
