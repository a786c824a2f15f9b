"""What YAML may say where an annotation stands."""

import pytest
from pydantic import ConfigDict, TypeAdapter, ValidationError

from gradwatch.config.names.yaml_types import UNKNOWN, Unwritable, to_type, to_value, type_of_default

SOURCE = """
from enum import Enum
class Mode(Enum):
    NEAREST = "nearest"
    BILINEAR = "bilinear"
class Weights(Enum):
    V1 = make()
    DEFAULT = V1
class Plain: ...
Fill = Union[int, Sequence[float]]
SIZE = 4
RATIO = SIZE / 8
"""


@pytest.fixture
def adapter(load_text):
    """Return a function from an annotation to a strict pydantic adapter."""

    def adapt(annotation):
        scope = load_text(f"{SOURCE}\ngiven: {annotation}")
        allowed = to_type(scope["given"].annotation, scope)
        return allowed if allowed is Unwritable else TypeAdapter(allowed, config=ConfigDict(strict=True))

    return adapt


@pytest.mark.parametrize(
    ("annotation", "value", "meant"),
    [
        ("int", 3, 3),
        ("float", 3, 3.0),
        ("bool", True, True),
        ("None", None, None),
        ("Optional[int]", None, None),
        ("int | None", None, None),
        ("'int | str'", "a", "a"),
        ("Literal['a', 2]", 2, 2),
        ("list[int]", [1, 2], [1, 2]),
        ("Sequence[float]", [1, 2.5], [1.0, 2.5]),
        ("list", [1, "a"], [1, "a"]),
        ("tuple[float, float]", [0.9, 0.95], (0.9, 0.95)),
        ("tuple[int, ...]", [1, 2, 3], (1, 2, 3)),
        ("tuple", [1, "a"], (1, "a")),
        ("dict[str, int]", {"a": 1}, {"a": 1}),
        ("dict", {"a": 1}, {"a": 1}),
        ("Union[str, pathlib.Path]", "data", "data"),
        ("numbers.Number", 2.5, 2.5),
        ("float | Tensor", 0.1, 0.1),
        ("Optional[Tensor]", [1, 2], [1.0, 2.0]),
        ("torch.dtype", "float16", "float16"),
        ("Mode", "bilinear", "bilinear"),
        ("Optional[Weights]", "DEFAULT", "DEFAULT"),
        ("Fill", [0.5], [0.5]),
        ("Union[int, Callable[[int], int]]", 4, 4),
        ("Annotated[int, 'positive']", 4, 4),
        ("Any", {"a": [1]}, {"a": [1]}),
    ],
)
def test_an_annotation_takes_what_yaml_can_say_for_it(adapter, annotation, value, meant):
    found = adapter(annotation).validate_python(value)

    assert (found, type(found)) == (meant, type(meant))


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        ("int", True),
        ("int", 1.0),
        ("int", "1"),
        ("float", True),
        ("float", "0.1"),
        ("bool", 1),
        ("tuple[float, float]", [0.9]),
        ("tuple[int, int]", [1, True]),
        ("list[int]", 1),
        ("float | Tensor", [0.1]),
        ("Mode", "cubic"),
        ("Union[str, Mode, int]", "cubic"),
        ("Weights", "V2"),
        ("torch.dtype", "float17"),
    ],
)
def test_an_annotation_refuses_what_it_does_not_mean(adapter, annotation, value):
    with pytest.raises(ValidationError):
        adapter(annotation).validate_python(value)


@pytest.mark.parametrize(
    "annotation",
    ["Callable[[int], int]", "nn.Module", "Plain", "type", "list[Callable]", "Unheard[int]", "dict[int, str]", "f()"],
)
def test_yaml_has_no_words_for_functions_and_objects(adapter, annotation):
    assert adapter(annotation) is Unwritable


@pytest.mark.parametrize(
    ("default", "allowed"), [(True, bool), ("a", str), (0, int | float), (0.5, int | float), (None, object)]
)
def test_a_default_tells_the_type_where_nothing_is_annotated(default, allowed):
    found = type_of_default(default)

    assert found == allowed or (allowed is object and TypeAdapter(found).validate_python([1]) == [1])


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("-1", -1),
        ("(0.9, None)", (0.9, None)),
        ("1.0 / 4", 0.25),
        ("SIZE", 4),
        ("(SIZE, RATIO)", (4, 0.5)),
        ("make(3)", UNKNOWN),
        ("Weights.V1", UNKNOWN),
        ("float('inf')", UNKNOWN),
        ("SIZE + 1", UNKNOWN),
    ],
)
def test_a_default_has_a_value_if_no_code_must_run_for_it(load_text, expression, value):
    scope = load_text(f"{SOURCE}\ngiven = {expression}")

    assert to_value(scope["given"].value, scope) == value
