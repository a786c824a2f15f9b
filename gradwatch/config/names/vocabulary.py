"""Find the names that one section of a config may use, regardless of case, underscores and usual endings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

from gradwatch.config.names.signatures import Signature
from gradwatch.config.names.spelling import american
from gradwatch.config.wording import list_choices, similarity, suggest

MAX_LISTED_NAMES = 8
"""Most names that a message lists; for more names, it shows the command that lists them."""
NUM_NEAREST = 3
"""Names that a message gives as examples if there are too many to list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One name that a config may use.

    Args:
        name: The stored name.
        read: Reads the signature.
        aliases: Other names, such as the code of a detector.
        is_own: Whether gradwatch defines it, not a library.
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
        noun: Singular noun, such as `optimizer`.
        plural: Name for `gradwatch list`.
        used_in: Key in a config, such as `optim.name`.
        own: Returns gradwatch's own entries.
        library: Returns the entries of torch or torchvision; called only if needed, since it reads their sources.
        library_noun: Noun for one of the library's names.
        suffix: Ending that may be omitted, such as `Loss`.
        usual: The most usual names, as examples if no name was given.
    """

    noun: str
    plural: str
    used_in: str
    own: Callable[[], tuple[Entry, ...]] = tuple
    library: Callable[[], tuple[Entry, ...]] = tuple
    library_noun: str = ""
    suffix: str = ""
    usual: tuple[str, ...] = ()

    def entries(self) -> tuple[Entry, ...]:
        """Return all entries, gradwatch's own first."""
        own = self.own()
        taken = {fold(entry.name) for entry in own}
        return (*own, *(entry for entry in self.library() if fold(entry.name) not in taken))

    def find(self, name: str) -> Entry | None:
        """Return the entry with a name in any of its spellings, or None."""
        wanted = (name, name + self.suffix)
        for entries in (self.own, self.library):  # own first, so that one of ours needs no source of a library
            for entry in entries():
                if any(is_same_name(w, known) for w in wanted for known in (entry.name, *entry.aliases)):
                    return entry
        return None

    def spellings(self, entry: Entry) -> tuple[str, ...]:
        """Return the name of an entry and its usual other spellings, such as `AdamW`, `adam_w`, `adamw`."""
        snake = snake_case(entry.name, suffix=self.suffix)
        return tuple(dict.fromkeys((entry.name, snake, fold(snake))))

    def suggest(self, name: str) -> str:
        """Return `did you mean 'x'?` with the best known name, or an empty string."""
        return suggest(name, [spelling for entry in self.entries() for spelling in self._names(entry)])

    def expected(self, name: str = "") -> str:
        """Return the names for a message; if there are many, only the nearest to a name."""
        entries = [entry for entry in self.entries() if not entry.read().unusable]
        if len(entries) <= MAX_LISTED_NAMES:
            return list_choices([entry.name for entry in entries])
        shows_all = f"(`gradwatch list {self.plural}` shows all)"
        if self.library_noun and (own := [entry.name for entry in self.own()]):
            return f"one of {', '.join(own)}, or {self.library_noun} {shows_all}"
        noun = self.library_noun or f"{'an' if self.noun[0] in 'aeiou' else 'a'} {self.noun}"
        return f"{noun} such as {', '.join(self._nearest(name, entries))} {shows_all}"

    def _nearest(self, name: str, entries: Sequence[Entry]) -> list[str]:
        """Return the nearest names or aliases, one per entry, the nearest first."""
        if not name and self.usual:
            return list(self.usual)
        best = [max(self._names(entry), key=partial(similarity, name)) for entry in entries]
        return sorted(best, key=partial(similarity, name), reverse=True)[:NUM_NEAREST]

    def _names(self, entry: Entry) -> tuple[str, ...]:
        """Return the spellings to suggest for an entry; the stored name is last, since suggestions prefer the last."""
        spellings = (snake_case(entry.name, suffix=self.suffix), *entry.aliases, entry.name)
        return tuple(dict.fromkeys(spellings))


def fold(name: str) -> str:
    """Return a name in lower case without underscores, hyphens and spaces, to compare spellings."""
    return "".join(c for c in name.casefold() if c not in "_- ")


def is_same_name(first: str, second: str) -> bool:
    """Return whether two names are spellings of one name, including British and American spellings."""
    return american(fold(first)) == american(fold(second))


def snake_case(name: str, *, suffix: str = "") -> str:
    """Return `cross_entropy` for `CrossEntropyLoss` with the suffix `Loss`."""
    stem = name.removesuffix(suffix) or name
    return "".join(f"_{c}" if _starts_word(stem, i) else c for i, c in enumerate(stem)).casefold()


def _starts_word(name: str, i: int) -> bool:
    before, after = name[i - 1 : i], name[i + 1 : i + 2]
    # a capital after a capital starts a word only before a small letter: `n_adam` for `NAdam`, but `asgd` for `ASGD`
    return i > 0 and name[i].isupper() and (before.islower() or (before.isupper() and after.islower()))
