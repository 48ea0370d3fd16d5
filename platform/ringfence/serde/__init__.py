"""Dataclasses to JSON and back, and their JSON Schema.

Parsing is pydantic's, over the standard library's dataclasses, made strict where pydantic's default is generous and
its strict mode too narrow (that one refuses the list which JSON has for a tuple). For what a field declares:

| declared | taken | not taken |
|---|---|---|
| `int` | 3, 3.0, "3" | True, 3.9, "3.0", "1_000" |
| `float` | 1, 1.5, "1.5", "1e3" | True, "nan", what is not finite |
| `bool` | true, 1, "true" "yes" "on" "1", and their opposites | 2, 1.0, "y" |
| `str` | a string | a number, bytes |
| a list, tuple, set or mapping | a list (in a set, the same twice is there once); an object | a string |
| `Enum` | the value, then the name | True for 1 |
| `Literal` | what is equal and of its type | "1" for 1, True for 1 |
| `date`, `datetime`, `time`, `timedelta` | ISO 8601 text | a timestamp |
| `bytes` | base64 text, also of the URL-safe alphabet | |
| `Decimal`, `UUID`, `Path`, a dataclass | their text; an object | |
| `object`, `Any` | anything, as it is | |

With ``coerce=False`` text and numbers are no longer converted to numbers, booleans or names of an enum. In a union, the
member whose type the value already has comes first, then their order. Instances of the declared types are taken too.

A field's ``metadata``, or a mapping in the ``Annotated`` that is its type, may have ``description``, ``alias`` and
these rules. They come in this order, and are not applied to defaults:

| rule | does |
|---|---|
| ``strip``, ``lower``, ``upper`` | change text, when they are true |
| ``ge``, ``gt``, ``le``, ``lt``, ``multiple_of`` | bound a number; the first four a date or time, too |
| ``min_length``, ``max_length`` | bound the length of text, bytes or a container |
| ``pattern`` | is found in text; without look-around |
| ``in``, ``not_in`` | lists what it is one of, or none of |
| ``validate`` | a function, or several, that raise ValueError, or return the value or nothing |
| ``convert`` | a function, or several, that return another value |

The words of JSON Schema (``minimum``, ``exclusiveMaximum``, ``maxLength``, ``minItems``, ``enum`` ...) and ``regex``,
``lowercase``, ``uppercase``, ``validators`` and ``transform`` mean the same. In a union a bound holds for the members
that can have it; where none can, the class is refused. A class may have ``__validate__`` and ``__post_validate__``,
which are called with the finished instance and raise ValueError.

A field with an ``alias`` is found by that or by its name. Where both are there the alias counts; ``extra="forbid"``
refuses the other one.

The schema says what a value has to be once text has been changed. It has no titles, which only repeat names, and no
words for functions, for bounds of dates, and for what a text has to look like that stands for a date, bytes or a number
as a key. Annotations are resolved in the module of the class, and in the function that defines it while that one runs.

pydantic costs 70 to 130 ms to import, so nothing here does it before a class is first parsed or described.
"""

from ringfence.serde.dumping import dump, dump_any
from ringfence.serde.parsing import STRICT_JSON, clone, decoder, parse, read_json
from ringfence.serde.schemas import schema

__all__ = ["STRICT_JSON", "clone", "decoder", "dump", "dump_any", "parse", "read_json", "schema"]
