"""Define the base classes of config sections: strict types, and settings that depend on a name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from gradwatch.config.names.checks import check_options, check_target, find_usable
from gradwatch.config.names.vocabulary import Vocabulary
from gradwatch.config.problems import raise_problem, raise_problems
from gradwatch.config.wording import list_choices, settings, show
from gradwatch.errors import Problem


class Section(BaseModel):
    """A mapping of a config: types as written, no unknown keys, never changed."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, ser_json_inf_nan="constants")


class OptionsSection(Section):
    """A section that also takes keyword arguments of something else: among its settings in YAML, in `options` here.

    A subclass declares the field `options` after the fields that decide which options are valid.
    """

    @model_validator(mode="before")
    @classmethod
    def _collect_options(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data  # pydantic reports it
        own = {key: data[key] for key in settings(cls) if key in data}
        return own | {"options": {key: value for key, value in data.items() if key not in own}}

    @model_serializer(mode="wrap")
    def _spread_options(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        options = data.pop("options", {})  # absent if defaults are left out
        # first what decides which options are valid, as people write it
        head = {key: data.pop(key) for key in ("name", "target", "match") if key in data}
        named = {key: value for key, value in head.items() if value is not None}
        return {**named, **options, **data}


class NamedSection(OptionsSection):
    """A section with a name; its further settings are keyword arguments of the named class or function."""

    vocabulary: ClassVar[Vocabulary]
    name_is_optional: ClassVar[bool] = False

    name: str | None = Field(default=None, validate_default=True)
    options: dict[str, Any] = Field(default_factory=dict, validate_default=True)

    @field_validator("name", mode="before")
    @classmethod
    def _find_name(cls, name: Any) -> str | None:
        if name in (None, ""):  # "" is the default of OptimSection.name, which has to be text
            if cls.name_is_optional or "target" in cls.model_fields:
                return None
            raise_problem(f"missing, expected {cls.vocabulary.expected()}")
        entry = find_usable(cls.vocabulary, name)
        if isinstance(entry, Problem):
            raise_problem(entry.text, help=entry.help)
        return entry.name

    @field_validator("options")
    @classmethod
    def _check_options(cls, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if "name" not in info.data:
            return options  # the wrong name is already a problem
        name = info.data["name"]
        if name is None:
            if "target" not in cls.model_fields:
                cls._refuse_options_of_nothing(options)
            return options  # the target takes them, and is imported only when the run is built
        entry = cls.vocabulary.find(name)
        assert entry, "a name that was validated is known"
        others = [key for key in settings(cls) if key not in ("name", "target")]
        checked, found = check_options(entry.read(), options, others=others)
        raise_problems(found)
        return checked

    @classmethod
    def _refuse_options_of_nothing(cls, options: Mapping[str, Any]) -> None:
        """Raise the problem of each option in a section that names nothing to take it."""
        text = f"unknown setting while no {cls.vocabulary.noun} is named, expected {list_choices(settings(cls))}"
        raise_problems([Problem((key,), text, is_about_key=True) for key in options], in_parent=True)


class TargetSection(NamedSection):
    """A section with a name, or with a `target` that is called with the further settings."""

    target: str | None = Field(
        default=None,
        validate_default=True,
        description="Your own, as package.module:factory; it is called with the further settings.",
    )

    @field_validator("target", mode="before")
    @classmethod
    def _check_target(cls, target: Any, info: ValidationInfo) -> str | None:
        if "name" not in info.data:
            return None  # the wrong name is already a problem
        name = info.data["name"]
        if target is None:
            if name is None and not cls.name_is_optional:
                names = cls.vocabulary.expected()
                raise_problem("needs a name or a target", help=f"name is {names}", in_parent=True)
            if name is None:
                cls._refuse_options_of_nothing(info.data["options"])
            return None
        if name is not None:
            raise_problem(f"got {show(target)} as well as name: {name}, expected only one of them")
        if wrong := check_target(target):
            raise_problem(wrong)
        return str(target)
