"""The names that one section of a config may use, forgiving of case, underscores and usual endings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from gradwatch.config.names.signatures import Signature
from gradwatch.config.wording import list_choices, suggest

MAX_LISTED_NAMES = 30
"""Names that a message lists; if there are more, it names the command that lists them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One name that a config may use.

    Args:
        name: The name as it is stored.
        read: Reads its signature.
        aliases: Other names for it, such as the code of a detector.
        is_own: Whether it is gradwatch's own, not a library's.
    """

    name: str
    read: Callable[[], Signature]
    aliases: tuple[str, ...] = ()
    is_own: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The names of one section.

    Args:
        noun: What one is called, such as `optimizer`.
        plural: Name for `gradwatch list`.
        used_in: Where a config has them, such as `optim.name`.
        own: Returns gradwatch's own.
        library: Returns the names of torch or torchvision, whose sources are read only if they are needed.
        library_noun: What one of the library's names is called.
        suffix: Ending that may be left out, such as `Loss`.
    """

    noun: str
    plural: str
    used_in: str
    own: Callable[[], tuple[Entry, ...]] = tuple
    library: Callable[[], tuple[Entry, ...]] = tuple
    library_noun: str = ""
    suffix: str = ""

    def entries(self) -> tuple[Entry, ...]:
        """Return all entries, gradwatch's own first."""
        own = self.own()
        taken = {fold(entry.name) for entry in own}
        return (*own, *(entry for entry in self.library() if fold(entry.name) not in taken))

    def find(self, name: str) -> Entry | None:
        """Return the entry of that name in any of its spellings, or None."""
        wanted = {fold(name), fold(name + self.suffix)}
        for entries in (self.own, self.library):
            for entry in entries():
                if not wanted.isdisjoint(map(fold, (entry.name, *entry.aliases))):
                    return entry
        return None

    def spellings(self, entry: Entry) -> tuple[str, ...]:
        """Return the name of an entry and its usual other spellings, such as `AdamW`, `adam_w`, `adamw`."""
        snake = snake_case(entry.name, suffix=self.suffix)
        return tuple(dict.fromkeys((entry.name, snake, fold(snake))))

    def suggest(self, name: str) -> str:
        """Return `; did you mean 'x'?` with the name that was probably meant, or an empty string."""
        # the stored spelling last: of two that are equally near it is the one that is suggested
        return suggest(name, [s for entry in self.entries() for s in reversed(self.spellings(entry)[:2])])

    def expected(self) -> str:
        """Return the names in the words of a message."""
        own = [entry.name for entry in self.own()]
        if len(self.entries()) <= MAX_LISTED_NAMES:
            return list_choices([entry.name for entry in self.entries() if not entry.read().unusable])
        others = f"{self.library_noun} (`gradwatch list {self.plural}` shows all)"
        return f"one of {', '.join(own)}, or {others}" if own else others


def fold(name: str) -> str:
    """Return a name without case, underscores, hyphens and spaces, in which its spellings may differ."""
    return "".join(c for c in name.casefold() if c not in "_- ")


def snake_case(name: str, *, suffix: str = "") -> str:
    """Return `cross_entropy` for `CrossEntropyLoss` with the suffix `Loss`."""
    stem = name.removesuffix(suffix) or name
    return "".join(f"_{c}" if _starts_word(stem, i) else c for i, c in enumerate(stem)).casefold()


def _starts_word(name: str, i: int) -> bool:
    before, after = name[i - 1 : i], name[i + 1 : i + 2]
    return i > 0 and name[i].isupper() and (before.islower() or (before.isupper() and after.islower()))
